from tests.engine.conftest import engine

__all__ = ["engine"]
