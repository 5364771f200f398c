from tests.support.engine_fixture import engine

__all__ = ["engine"]
