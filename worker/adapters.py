"""The LoRA adapters of a worker: those that orders may name, and those that still have sequences."""

from collections.abc import Callable

from baton.errors import CorruptWeights
from baton.messages import AdapterCard, LoadAdapter
from engine.runner import Runner


class WorkerAdapters:
    """Loads adapters into a runner. Removes one once nothing uses it: vLLM would load it again for a row of a step."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self.digests = {one.digest for one in runner.adapters}  # that orders may name; the scheduler looks here
        self._retired: set[str] = set()

    @property
    def cards(self) -> tuple[AdapterCard, ...]:
        """Those that orders may name."""
        return tuple(one for one in self._runner.adapters if one.digest in self.digests)

    def load(self, order: LoadAdapter) -> None:
        """Load an adapter, unless it is there. Raises ModelError."""
        if any(one.name == order.name for one in self.cards):
            return
        card = self._runner.add_adapter(order.name, order.path)
        if order.digest not in ("", card.digest):
            self._runner.remove_adapter(card.digest)
            raise CorruptWeights(
                f"the LoRA adapter in {order.path} has the digest {card.digest} here and {order.digest} on another "
                "worker; the folder must hold the same files on every node"
            )
        self.digests.add(card.digest)

    def unload(self, name: str) -> None:
        """Let no order name an adapter any more."""
        retired = {one.digest for one in self.cards if one.name == name}
        self.digests -= retired
        self._retired |= retired

    def remove_unused(self, used: Callable[[str], bool]) -> None:
        """Remove those that were unloaded and that nothing uses any more."""
        for digest in [digest for digest in self._retired if not used(digest)]:
            self._retired.remove(digest)
            self._runner.remove_adapter(digest)
