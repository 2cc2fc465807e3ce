"""Hidden states of the calibration tokens between two layers: in files, so that memory holds a few sequences of them.

    <folder>/<name>-00007.bin     the input of layer 7: [n, hidden] fp32 of every sequence, one after another
    <folder>/<name>-00007.json    whose it is and the checksum of every sequence, written last

A run that was killed takes up the newest whole file. The input of a layer stays until the layer after it is begun, so
there are two files at most. They are scratch: nothing waits until they are on the disk, and one that is damaged or of
another run is as good as none.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from twobit.format.writer import write_file, writing

if TYPE_CHECKING:
    import torch


def spill_bytes(tokens: int, hidden: int) -> int:
    """What the files of one stream take at most."""
    return 2 * 4 * tokens * hidden


class States:
    """One fp32 [n, hidden] per sequence, at the input of layer `layer`; -1: none yet. Threads may share it."""

    def __init__(self, folder: Path, owner: str, lengths: Sequence[int], hidden: int, name: str = "states") -> None:
        """owner: a hash of all that the states depend on; lengths: tokens of every sequence; name: of this stream."""
        self.folder, self._name, self._hidden = folder, name, hidden
        self._owner: dict[str, Any] = {"owner": owner, "lengths": list(lengths), "hidden": hidden}
        self._shapes = [(n, hidden) for n in lengths]
        self._offsets = [0, *(4 * hidden * np.cumsum(lengths)).tolist()]
        self._sums = [0] * len(lengths)
        self.layer = -1

    def of(self, name: str, lengths: Sequence[int]) -> States:
        """Another stream of the same run."""
        return States(self.folder, self._owner["owner"], lengths, self._hidden, name)

    def resume(self, at_most: int) -> bool:
        """Takes up the states of the last layer <= at_most that are there and whole; False: there are none."""
        with writing(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
        pattern = re.compile(rf"{re.escape(self._name)}-(\d{{5}})\.bin")
        found = sorted(int(match[1]) for match in map(pattern.fullmatch, os.listdir(self.folder)) if match)
        self.layer = next((i for i in reversed(found) if i <= at_most and self._whole(i)), -1)
        for layer in found:
            if layer != self.layer:
                self._forget(layer)
        return self.layer >= 0

    def begin(self) -> None:
        """Starts the file of the next layer's input (of the first layer's, where there is none yet)."""
        self._forget(self.layer - 1)
        self._forget(self.layer + 1)
        path = self._path(self.layer + 1)
        with writing(path):
            path.touch()

    def write(self, i: int, state: torch.Tensor) -> None:
        """Sequence i at the input of the next layer."""
        data = np.ascontiguousarray(state.detach().cpu().numpy(), "<f4")
        if data.shape != self._shapes[i]:
            raise ValueError(f"state {i} of shape {data.shape}, expected {self._shapes[i]}")
        self._sums[i] = zlib.crc32(data.data)
        with writing(self._path(self.layer + 1)), open(self._path(self.layer + 1), "r+b") as file:
            file.seek(self._offsets[i])
            file.write(data.data)

    def commit(self) -> None:
        """All sequences are written: from here on `read` gives the input of the next layer."""
        layer = self.layer + 1
        text = json.dumps(self._owner | {"crc32": self._sums}).encode()
        write_file(self._path(layer, "json"), lambda file: file.write(text))
        self.layer = layer

    def read(self, i: int) -> torch.Tensor:
        """Sequence i at the input of the current layer."""
        import torch

        return torch.from_numpy(self._read(self.layer, i))

    def remove(self) -> None:
        """Deletes the folder."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _read(self, layer: int, i: int) -> np.ndarray:
        count = self._shapes[i][0] * self._shapes[i][1]
        return np.fromfile(self._path(layer), "<f4", count, offset=self._offsets[i]).reshape(self._shapes[i])

    def _path(self, layer: int, suffix: str = "bin") -> Path:
        return self.folder / f"{self._name}-{layer:05d}.{suffix}"

    def _whole(self, layer: int) -> bool:
        try:
            record = json.loads(self._path(layer, "json").read_bytes())
            if {key: record[key] for key in self._owner} != self._owner:
                return False
            sums = [zlib.crc32(self._read(layer, i).data) for i in range(len(self._shapes))]
            return bool(record["crc32"] == sums)
        except (OSError, ValueError, KeyError, TypeError):
            return False

    def _forget(self, layer: int) -> None:
        for suffix in ("json", "bin"):  # the record first: it says that the other is whole
            self._path(layer, suffix).unlink(missing_ok=True)
