"""LoRA adapters that are loaded while the cluster serves: which there are, and which workers are still to load one.

    load ──▶ one worker loads it and tells its digest ──▶ all others load the same ──▶ served
             └── it can't: the call fails                  └── one can't: all unload it, and the call fails

A worker's Hello lists what it has. So every router knows every adapter, and a worker that joins is told of those that
it lacks. An adapter stays known while no worker lives. Pure.
"""

# pyright: strict

from __future__ import annotations

from dataclasses import dataclass

from baton.config import ModelConfig
from baton.errors import BatonError, InvalidRequest, ModelMismatch, PermissionDenied, Unavailable, from_reason, shown
from baton.messages import MAX_NAME, AdapterCard, AdapterFailed, LoadAdapter, UnloadAdapter
from router.members import ClusterMembership, MemberRecord
from router.outbox import Outbox


@dataclass
class _Loading:
    path: str
    first: str  # the incarnation that tells the digest
    error: BatonError | None = None


class RuntimeAdapters:
    """The adapters beside those of the configuration."""

    def __init__(self, config: ModelConfig, members: ClusterMembership, outbox: Outbox) -> None:
        self._config, self._members, self._out = config, members, outbox
        self._loading: dict[str, _Loading] = {}  # by name

    def load(self, name: str, path: str) -> None:
        """Begin to load an adapter. Raises InvalidRequest, PermissionDenied and Unavailable."""
        known = self._members.adapters
        if not self._config.max_loras:
            raise PermissionDenied("adapters can't be loaded while this cluster serves; start it with model.max_loras")
        if not 1 <= len(name) <= MAX_NAME or not name.isprintable() or name in self._config.served_names:
            raise InvalidRequest(
                f"lora_name is {shown(repr(name))}; it must have 1 to {MAX_NAME} printable characters, and not be a "
                "name of the model"
            )
        if name in known or (name in self._loading and self._loading[name].error is None):
            raise InvalidRequest(f"there is a LoRA adapter {name!r} already; unload it first, or choose another name")
        if len(known) >= self._config.max_loras:
            raise InvalidRequest(f"{len(known)} LoRA adapters are loaded, as many as model.max_loras; unload one first")
        workers = self._workers()
        if not workers:
            raise Unavailable("no worker is live that could load an adapter")
        self._loading[name] = _Loading(path, workers[0].incarnation)
        self._out.send(workers[0].incarnation, LoadAdapter(name, path))

    def unload(self, name: str) -> None:
        """Have every worker unload an adapter once its requests have ended. Raises InvalidRequest and ModelMismatch."""
        if name in self._config.lora_modules:
            raise InvalidRequest(f"the LoRA adapter {name!r} is one of model.lora_modules, which stay")
        if name not in self._members.adapters:
            raise ModelMismatch(f"there is no LoRA adapter {shown(repr(name))}")
        self._drop(name)

    def is_loaded(self, name: str) -> bool:
        """Whether every worker has an adapter that is being loaded. Raises the error for which it could not be."""
        loading = self._loading[name]
        if loading.error is None and name in self._members.adapters and not self._lacking(name):
            del self._loading[name]
            return True
        if loading.error is None and name not in self._members.adapters and self._members.get(loading.first) is None:
            loading.error = Unavailable(f"the worker that was to load {name!r} is gone; try again")
        if loading.error is not None:
            del self._loading[name]
            raise loading.error
        return False

    def abandon(self, name: str) -> None:
        """Nothing waits for an adapter that is being loaded any more: it is unloaded."""
        if self._loading.pop(name, None) is not None:
            self._drop(name)

    def greeted(self, member: MemberRecord, *, new: bool) -> None:
        """A worker has said what it has."""
        model = member.hello.model
        if model is None:
            return
        for card in self._members.adapters.values() if new else ():
            if card.name not in {one.name for one in model.adapters}:
                self._out.send(member.incarnation, LoadAdapter(card.name, card.path, card.digest))
        for name, loading in self._loading.items():
            if loading.first == member.incarnation and (card := self._members.adapters.get(name)) is not None:
                loading.first = ""
                for other in self._lacking(name):
                    self._out.send(other.incarnation, LoadAdapter(name, card.path, card.digest))

    def failed(self, member: MemberRecord, failure: AdapterFailed) -> None:
        """A worker could not load one."""
        why = f"{member.peer.name}: {failure.message}"
        self._out.log(f"LoRA adapter {failure.name}: {why}", warning=True, kind="adapter")
        if (loading := self._loading.get(failure.name)) is not None and loading.error is None:
            loading.error = from_reason(failure.reason, why)
            self._drop(failure.name)

    def lacking(self, name: str) -> set[str]:
        """The workers that don't have an adapter, by incarnation."""
        return {member.incarnation for member in self._lacking(name)}

    def _drop(self, name: str) -> None:
        self._members.adapters.pop(name, None)
        for member in self._workers():
            self._out.send(member.incarnation, UnloadAdapter(name))

    def _lacking(self, name: str) -> list[MemberRecord]:
        return [
            member
            for member in self._workers()
            if member.hello.model is not None and name not in {one.name for one in member.hello.model.adapters}
        ]

    def _workers(self) -> list[MemberRecord]:
        return [*self._members.with_role("decode"), *self._members.with_role("prefill")]


def served(config: ModelConfig, adapters: dict[str, AdapterCard]) -> dict[str, str]:
    """Return the directory of every adapter that clients may name."""
    return config.lora_modules | {name: card.path for name, card in adapters.items()}
