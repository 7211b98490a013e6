"""Trains privately in the user's own loop: `batches`, `backward`, `step`; refuses what the account does not cover."""

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from hashlib import sha256
from numbers import Real
from typing import Any, NoReturn
from weakref import WeakSet

from torch import Tensor, nn

from groupwise.errors import UserError, reason
from groupwise.privacy import NoiseSource, PrivacyPlan
from groupwise.privacy.accountants import is_whole
from groupwise.private.batches import Order, Place, check_loading, check_processes, length_of, load, parts_of, print_of
from groupwise.private.seal import check_seal, sealed
from groupwise.private.watch import Watch, check_parameters
from groupwise.training.mechanism import Mechanism

TAKEN: WeakSet[nn.Module] = WeakSet()
"""Modules of the models that are private now."""
_OPEN: WeakSet["Private"] = WeakSet()
"""Whose microbatch waits for its backward pass: one at most, as the default generators can be of one key alone."""


class Private:
    """What `make_private` returns: the one way in which its model may learn from its data.

    Example:
        for x, y in private.batches(microbatch=64):
            private.backward(F.cross_entropy(model(x), y, reduction="none"))
            private.step()
    """

    def __init__(self, mechanism: Mechanism, data: Any, undo: ExitStack) -> None:
        assert mechanism.engine is not None, "make_private clips always"
        self.mechanism, self.engine, self._data = mechanism, mechanism.engine, data
        self._undo = undo
        """Gives the model back as it was."""
        self._hook = mechanism.optimizer.register_step_pre_hook(self._before_optimizer)
        self._context = ExitStack()
        self._loop = 0
        """Which call of `batches` is in force; a loop with an older number is over."""
        self._rows: int | None = None
        """Examples of the microbatch that waits for its backward pass."""
        self._last = self._summed = self._closing = self._closed = self._filler = self._agreed = False
        self._watch, self._process = Watch(mechanism), os.getpid()
        TAKEN.update(mechanism.model.modules())

    # -- what was promised and spent --------------------------------------------------------------------------------

    @property
    def plan(self) -> PrivacyPlan:
        """What was promised; it sets all noise scales."""
        return self.mechanism.plan

    @property
    def executed(self) -> int:
        """Steps that were released, those with an empty batch included."""
        return self.mechanism.executed

    @property
    def epsilon(self) -> float:
        """ε of the steps that were executed, at the plan's δ, accounted anew (seconds, after a step).

        It is a guarantee if nothing of the run decided how many they are; else the plan's is (docs/privacy.md).
        """
        return self.plan.spent_epsilon(self.executed)

    def statement(self) -> str:
        """The plan in words, and what was spent of it."""
        secret = "" if self.mechanism.noise.is_secret else "\n  NOT PRIVATE: the noise comes from a seed."
        spent = f"epsilon = {self.epsilon:.4g} at delta = {self.plan.delta:g}"
        return f"{self.plan.statement()}{secret}\nSpent: {spent} in {self.executed} of {self.plan.steps} steps."

    # -- the loop -----------------------------------------------------------------------------------------------------

    def batches(
        self,
        microbatch: int = 64,
        *,
        steps: int | None = None,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        pin_memory: bool = False,
        order: Order | None = None,
    ) -> Iterator[Any]:
        """Draw the batches of the steps that are left, and yield them in microbatches.

        Every step yields: of one that draws nobody, on this process, an example whose losses `backward` takes times 0,
        so that what is done once a step, say to the learning rate, tells nothing. A loop that is left in the middle of
        a logical batch has released nothing of it; the next one begins the same batch again, where memory ran out
        with a smaller ``microbatch``. From the yield until `backward` has returned, the default generators of torch,
        Python and numpy are the key's, for the masks of the model; a generator of your own is yours to seed.

        Args:
            microbatch: examples at once, at most; the update depends on it by rounding and masks alone.
            steps: after how many steps to stop, to evaluate or to save; by default after the last of the plan.
            num_workers, collate_fn, pin_memory: as in ``torch.utils.data.DataLoader``.
            order: the numbers of this process's examples of a batch, (n,), in the order in which they share
                microbatches: the longest texts first, say. By default as they are numbered.

        Raises:
            UserError: all steps of the plan were taken; the data grew or shrank; an argument out of range.
        """
        self._check_open()
        check_processes(self.mechanism.ranks)
        self._check_agreed()
        for name, value in (("microbatch", microbatch), ("steps", 1 if steps is None else steps)):
            if not isinstance(value, Real) or not is_whole(value) or value < 1:
                raise UserError(f"{name}={value!r} is out of range: give a whole number of at least 1.")
        check_loading(num_workers, collate_fn, order)
        if self.executed >= self.plan.steps:
            raise UserError(
                f"All {self.plan.steps} steps of the plan were taken, and one more would cost more than was promised: "
                "plan more epochs or steps in make_private (`batches` goes through all of them, not through one epoch)."
            )
        if length_of(self._data) != self.plan.dataset_size:
            raise UserError(
                f"The data had {self.plan.dataset_size} examples and have {length_of(self._data)} now: the plan is for "
                "the former; make_private anew."
            )
        self._leave()
        self._loop += 1
        end = self.plan.steps if steps is None else min(self.plan.steps, self.executed + steps)
        options = {"num_workers": int(num_workers), "collate_fn": collate_fn, "pin_memory": pin_memory}
        return self._microbatches(self._loop, end, int(microbatch), order, options)

    def _microbatches(
        self, loop: int, end: int, size: int, order: Order | None, options: dict[str, Any]
    ) -> Iterator[Any]:
        mechanism = self.mechanism
        places = self._places(self.executed, end, size, order)
        loaded = load(self._data, places, mechanism.noise, mechanism.ranks.replica, **options)
        try:
            while self.executed < end:
                step = self.executed
                self._reshard()
                parts = parts_of(mechanism, mechanism.open(step), size, order)
                self._watch.mark()
                for number, (start, rows, filler) in enumerate(parts, 1):
                    batch = next(loaded)
                    self._check_loop(loop)
                    self._rows, self._filler = len(rows), filler
                    self._last = number == len(parts)
                    self._open(step, start)
                    yield batch
                    self._check_loop(loop)
                    if self._rows is not None:
                        raise UserError(
                            "A microbatch had no private.backward(losses): all that are drawn take part in their step."
                        )
                if self.executed == step:
                    raise UserError(
                        "private.step() was not called after the last microbatch of a batch: call it after each "
                        "private.backward(losses), and it acts when the batch is complete."
                    )
        finally:
            if loop == self._loop:
                self._leave()

    def _open(self, step: int, start: int) -> None:
        """From here on the default generators are the key's; a microbatch of another training that waits is void."""
        for other in list(_OPEN):
            other._leave()
            other._loop += 1
        _OPEN.add(self)
        self._context.callback(_OPEN.discard, self)
        self._context.enter_context(self.mechanism.microbatch(step, start))

    def _places(self, first: int, end: int, size: int, order: Order | None) -> Iterator[Place]:
        for step in range(first, end):
            for start, rows, _ in parts_of(self.mechanism, self.mechanism.sampler.indices(step), size, order):
                yield step, start, rows.tolist()

    def _reshard(self) -> None:
        """Whole parameters that an evaluation left behind become shards again."""
        if self.mechanism.in_shards:
            from groupwise.training.shards import reshard

            reshard(self.mechanism.model)

    def backward(self, losses: Tensor) -> None:
        """Add the clipped gradients of the microbatch; nothing is released.

        Args:
            losses: one for each of its examples, (b,), in their order; of that example alone.

        Raises:
            UserError: outside of `batches`, or twice; losses of another number; gradients that changed since the last
                backward pass; what `ClippingEngine.backward` refuses.
        """
        self._check_open()
        if self._rows is None:
            raise UserError(
                "private.backward has no microbatch to act on: call it once for each that private.batches() yields, "
                "inside that loop, and before another private training draws its own."
            )
        shape = tuple(getattr(losses, "shape", ()))
        if shape != (self._rows,):
            raise UserError(
                f"losses has shape {shape} for the {self._rows} examples that were drawn: give one loss for each of "
                "them (reduction='none'), and of no others."
            )
        self._watch.check_gradients()
        self._watch.check_modules()
        try:
            self.mechanism.backward(losses, self._filler)
        except BaseException:
            self._leave()  # the sums may be halves: only a batch that begins again can be released
            self._loop += 1
            raise
        self._context.close()
        self._rows, self._summed = None, True
        self._watch.mark()

    def step(self) -> bool:
        """Release, update and count the step if its batch is complete; else do nothing.

        Returns:
            Whether it did: then a learning-rate scheduler may step.

        Raises:
            UserError: no `backward` since the last call; gradients or parameters that are others than they were.
        """
        self._check_open()
        if not self._summed:
            raise UserError(
                "private.step() has nothing new to act on: call it once after each private.backward(losses), inside "
                "the loop over private.batches()."
            )
        self._watch.check_gradients()
        self._summed = False
        if self._last:
            self._close()
            return True
        return False

    def _close(self) -> None:
        check_parameters(self.mechanism.model, self.mechanism.optimizer)
        self._closing = True
        try:
            self.mechanism.close()
        finally:
            self._closing = self._last = False

    @property
    def _processes(self) -> str:
        replicas = self.mechanism.ranks.replicas
        return f"{replicas} process{'' if replicas == 1 else 'es'}{' in shards' if self.mechanism.in_shards else ''}"

    # -- what is refused ----------------------------------------------------------------------------------------------

    def _before_optimizer(self, *_: Any) -> None:
        if not self._closing:
            raise UserError(
                "optimizer.step() would apply gradients without noise: call private.step() in its place (and no "
                "GradScaler, which calls it too)."
            )

    def _check_agreed(self) -> None:
        """Refuse processes that would draw other batches or noise than each other, or from other data."""
        ranks = self.mechanism.ranks
        key = sha256(b"groupwise agreed" + self.mechanism.noise.key).hexdigest()
        if len(set(ranks.gather((key, self.executed)))) > 1:
            raise UserError(
                "The processes are at other steps than each other, or have other keys: load one and the same state "
                "in all of them."
            )
        if self._agreed or ranks.replicas == 1:
            return
        promised = repr((self.plan.to_dict(), self.engine.thresholds.tolist()))
        if (
            len(set(ranks.gather(promised))) > 1
            or len(set(ranks.gather(print_of(self._data, self.mechanism.noise))) - {None}) > 1
        ):
            raise UserError(
                "The processes have other data, plans or thresholds than each other: give make_private the same "
                "arguments and the whole data set in each of them (it deals the examples out itself)."
            )
        self._agreed = True

    def _check_loop(self, loop: int) -> None:
        self._check_open()
        if loop != self._loop:
            raise UserError(
                "This loop over private.batches() is over, as another began (two trainings take turns microbatch by "
                "microbatch: backward before the other draws) or a backward pass failed: take a new one."
            )

    def _check_open(self) -> None:
        if self._closed:
            raise UserError("This private training was detached: make_private anew, with a budget of its own.")
        if os.getpid() != self._process:
            raise UserError(
                "This private training is of the process that made it, and a fork would add the same noise to other "
                "gradients: call make_private in each process, with a budget of its own."
            )

    def _leave(self) -> None:
        """Give the generators back, and forget the microbatch and the sums that wait."""
        self._context.close()
        self._rows, self._summed, self._last = None, False, False

    def __deepcopy__(self, memo: Any) -> NoReturn:
        """Refuse: two trainings with one key would add the same noise twice."""
        self.__reduce_ex__(2)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Refuse, as for copies."""
        raise UserError(
            "A private training is not copied or pickled, as its copy would add the same noise again: keep "
            "private.state_dict(), and load it into a new one."
        )

    # -- going on later -----------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """All that a resumed run needs, after the last complete step; it holds the key of the noise, so keep it secret.

        A batch that is under way is not in it: it is drawn again, with the same noise. As of any module, its tensors
        are those that go on training: save it at once, or ``copy.deepcopy`` it; ``load_state_dict`` knows one that has
        changed since. In shards every process calls, and gets whole tensors on the CPU.
        """
        self._check_open()
        if self._closing:
            raise UserError("state_dict() within a step would repeat its noise later: call it after private.step().")
        self._reshard()
        state = {
            **self.mechanism.state_dict(),
            "processes": self._processes,
            "step": self.executed,
            "model": self.mechanism.model.state_dict(),
            "optimizer": self.mechanism.optimizer.state_dict(),
        }
        if self.mechanism.in_shards:
            from groupwise.training.shards import whole_state

            state = whole_state(state)
        return sealed(state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was taken, to the same bits; before the first step.

        Raises:
            UserError: after a step; a state of another plan, of something else, altered, or whose tensors trained on.
        """
        self._check_open()
        if self.executed:
            raise UserError(
                f"{self.executed} steps were taken here already, and going back would repeat their noise on other "
                "gradients: make_private anew, and load the state before the first step."
            )
        named = state if isinstance(state, dict) else {}
        if "plan" in named and named["plan"] != self.plan.to_dict():
            raise UserError(
                "The state was made under another plan (data, budget, steps or groups): give the same ones."
            )
        if named.get("processes", self._processes) != self._processes:
            raise UserError(
                f"The state was made by {named['processes']}, and here are {self._processes}: other processes share a "
                "batch otherwise, and its noise would meet other gradients. Start as many, or make_private anew."
            )
        check_seal(state, self.plan.steps)
        self._leave()
        self._loop += 1
        mechanism = self.mechanism
        if mechanism.in_shards:
            from groupwise.training.shards import state_in_shards

            self._reshard()
            state = state_in_shards(state, mechanism.model, mechanism.trainable)
        try:
            noise = NoiseSource.from_state(state)
            mechanism.model.load_state_dict(state["model"])
            mechanism.optimizer.load_state_dict(state["optimizer"])
            mechanism.load_state_dict(state, state["step"])
        except UserError:
            raise
        except (RuntimeError, ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"The state does not fit this model and optimiser ({reason(error)}): make them as they were. The key "
                "of the noise was not taken over."
            ) from error
        mechanism.use_key(noise)  # last: where anything failed, no noise of that run may meet other gradients

    def detach(self) -> None:
        """End the training: the model and the optimiser are as they were, and nothing more is released here."""
        if not self._closed:
            self._leave()
            self._closed = True
            self.mechanism.drop()
            self._hook.remove()
            self._undo.close()
            for module in self.mechanism.model.modules():
                TAKEN.discard(module)
