"""What test_cuda.py runs in a process of its own, where the loader finds stand-ins for CUDA: cases.py CASE MODEL.

A case fails by an exception. See libcuda.c for what the stand-in does.
"""

from __future__ import annotations

import ctypes
import gc
import os
import sys
from pathlib import Path

import numpy as np

from twobit.errors import RuntimeFailure
from twobit.runtime import device as devices
from twobit.runtime.device import Device, DeviceMissing, place
from twobit.runtime.lib import call, lib
from twobit.runtime.model import Model
from twobit.runtime.sampling import Sampling
from twobit.runtime.session import Session, StepOptions, Use

CASE, MODEL = sys.argv[1], Path(sys.argv[2])
SAMPLING = Sampling(temperature=0.8, seed=7)
FULL = StepOptions(draft_max=4, draft_fixed=True, draft_full=True)
DRAFTS = (StepOptions(draft_max=4, draft_fixed=True), StepOptions(draft_max=13, draft_tree=True, draft_vocab=48))
PROMPT = [5 + 37 * i % 250 for i in range(12)]
FAKE = ctypes.CDLL("libcuda.so.1") if os.environ["FAKE_LIBRARIES"] else None


def model_on(on: Device, layers: int = 0) -> Model:
    model = Model.open(MODEL)
    call(lib.tb_model_place, model.c_model, on.c_gpu, layers, 256)
    model.placed = devices.Placed(on, layers, False, on.used, 256)
    return model


def fail(name: str, n: int, code: int = 719) -> None:
    assert FAKE is not None
    FAKE.fake_fail(name.encode(), ctypes.c_long(n), code)


def nothing_left() -> None:
    assert FAKE is not None
    gc.collect()
    FAKE.fake_live.restype = ctypes.c_long
    assert FAKE.fake_live() == 0, f"{FAKE.fake_live()} things of the device are still alive"


def results(kind: str, layers: int) -> list[object]:
    """Bits and tokens of every way to evaluate."""
    model, found = model_on(Device(kind), layers), []
    for stream in (-1, 1):
        session = Session(model, 256, 2)
        session.stream_from(stream)
        logits = session.eval(PROMPT * 3, every=True, chunk=16)
        assert logits is not None
        found.append(logits.tobytes())
    for options in (StepOptions(draft_max=0), *DRAFTS, FULL, StepOptions(draft_max=16)):
        session, history = Session(model, 256, 2), list(PROMPT)
        session.sync(history[:-1])
        while len(history) < 40:
            history += session.step(history, SAMPLING, options).tokens
        found.append(history[:40])
    return found


def bits() -> None:
    """The CUDA driver gives what the plain-C device gives, also where nothing runs before it must."""
    for layers in (0, 1, 99):
        assert results("cuda", layers) == results("plain", layers), f"{layers} layers"
    nothing_left()


def waits() -> None:
    """A chain of passes is waited for once: for what it found, and for the end of its work."""
    assert FAKE is not None
    FAKE.fake_waits.restype = ctypes.c_long
    counts, model = [], model_on(Device("cuda"))
    for use in (Use.ALL & ~Use.OVERLAP, Use.ALL & ~Use.OVERLAP & ~Use.CHAIN):
        session, history, chained = Session(model, 256, 1), list(PROMPT), 0
        session.sync(history[:-1])
        before = FAKE.fake_waits()
        while len(history) < 40:
            step = session.step(history, SAMPLING, StepOptions(draft_max=6, draft_fixed=True, use=use))
            history += step.tokens
            chained += step.chained
        counts.append((history, FAKE.fake_waits() - before, chained))
    assert counts[0][0] == counts[1][0]
    assert counts[0][2] > 0 == counts[1][2]
    assert counts[1][1] - counts[0][1] == 2 * counts[0][2]


def opens() -> None:
    on = Device("cuda")
    assert (on.name, on.memory, on.used, lib.tb_gpu_real(on.c_gpu)) == ("Fake GPU", 16 << 30, 0, 1)
    x = np.ones((2, 70), np.float32)
    from gpu import run

    flag = {0: x, 2: np.zeros(1000, np.uint8), 3: np.zeros(1, np.int32)}
    assert run(on, "round_acts", (1, 2), flag, m=2, n=70, kind=1, place=42)[3][0] == 0
    del on
    nothing_left()


def refuses() -> None:
    """Prints why the device is not used."""
    try:
        Device("cuda")
    except RuntimeFailure as error:
        print("absent:" if isinstance(error, DeviceMissing) else "unusable:", error)
        return
    print("used")


def lost() -> None:
    """Whatever call fails, and whenever: an error, never other text, and no more text from that device."""
    session, plain = Session(model_on(Device("cuda")), 256, 1), list(PROMPT)
    session.sync(plain[:-1])
    while len(plain) < 48:
        plain += session.step(plain, SAMPLING, StepOptions(draft_max=0)).tokens
    copies = ("cuMemcpyHtoDAsync_v2", "cuMemcpyDtoHAsync_v2")
    waits = ("cuEventRecord", "cuEventSynchronize", "cuStreamSynchronize", "cuStreamWaitEvent", "cuCtxSetCurrent")
    happened = 0
    for name in (*copies, *waits, "cuLaunchKernel", "execute"):
        for n in (1, 7, 100):
            options = DRAFTS[n % 2]
            model = model_on(Device("cuda"))
            session, history = Session(model, 256, 1), list(PROMPT)
            session.sync(history[:-1])
            fail(name, n, 719 if n == 7 else 999)
            try:
                while len(history) < 48:
                    history += session.step(history, SAMPLING, options).tokens
                fail("", 0, 0)
            except RuntimeFailure as error:
                assert "the device failed" in str(error) and "--device cpu" in str(error), error
                happened += 1
                for again in (session, None):
                    try:
                        (again or Session(model, 64, 1)).eval([5], logits=False)
                    except RuntimeFailure as later:
                        assert "failed" in str(later) or "out of memory" in str(later), later
                    else:
                        raise AssertionError("a lost device went on") from error
            assert history[:48] == plain[: len(history[:48])], f"{name} {n}"
            del session, model
            gc.collect()
            assert FAKE is not None
            FAKE.fake_recover()
    assert happened >= 20, happened


def memory() -> None:
    """Less memory than the device said: fewer layers have their residual there; by number it is an error."""
    assert FAKE is not None
    on, layers = Device("cuda"), len(Model.open(MODEL).architecture.layers)
    everything = place(Model.open(MODEL), on, 64)
    assert everything.residual_layers == layers and everything.residual_head
    gc.collect()
    assert on.used == 0
    seen = set()
    for room in range(0, everything.vram + 50_000, 25_000):
        FAKE.fake_room(ctypes.c_size_t(room))
        model = Model.open(MODEL)
        try:
            placed = place(model, on, 64)
        except RuntimeFailure as error:
            assert "out of memory" in str(error), error
            assert not seen
        else:
            assert on.used <= room
            seen.add(placed.residual_layers + placed.residual_head)
        del model
        gc.collect()
        assert on.used == 0, "a refused placement leaves memory behind"
    assert {0, layers + 1} <= seen and len(seen) >= 3, seen
    FAKE.fake_room(ctypes.c_size_t(everything.vram // 3))
    try:
        place(Model.open(MODEL), on, 64, residual_layers=layers)
    except RuntimeFailure as error:
        assert "out of memory" in str(error) and "--gpu-residual-layers" in str(error.__dict__ or error), error
    else:
        raise AssertionError("more layers than fit")
    for name in ("cuMemHostAlloc", "cuMemHostGetDevicePointer_v2"):
        FAKE.fake_room(ctypes.c_size_t(1 << 34))
        fail(name, 1, 2)
        try:
            Session(model_on(on), 64, 1).eval([5, 6, 7])
        except RuntimeFailure as error:
            assert "out of memory" in str(error), error
        else:
            raise AssertionError(f"{name} is not looked at")
        gc.collect()
    del on, everything, placed
    nothing_left()


def finite() -> None:
    """A number that is not one is named, with the layer, on the device too."""
    model = model_on(Device("cuda"), 99)
    name = next(n for n in model.packed.planes if n.endswith("layers.1.mlp.down_proj.row_scale"))
    plane = model.packed.planes[name].copy()
    plane.view(np.float32)[3] = np.nan
    model.packed.planes[name] = plane
    bad, on = Model(model.packed), Device("cuda")
    call(lib.tb_model_place, bad.c_model, on.c_gpu, 0, 256)
    try:
        Session(bad, 64, 1).eval([5, 6, 7])
    except RuntimeFailure as error:
        assert "layer 2: the input of q/k/v_proj is not finite" in str(error), error
    else:
        raise AssertionError("a NaN went unseen")


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent.parent))
    {f.__name__: f for f in (bits, waits, opens, refuses, lost, memory, finite)}[CASE]()
