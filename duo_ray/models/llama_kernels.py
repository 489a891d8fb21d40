"""Which layouts llama.cpp may bring weights into: any but AMX's, whose kernels crash (llama.cpp issue 20824)."""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from itertools import takewhile
from typing import Any

from llama_cpp._ggml import libggml

_ALTERNATE_STACK = 8192
"""Bytes: enough for the registers of AVX-512, too small for AMX's."""
_CPU = 0
"""GGML_BACKEND_DEVICE_TYPE_CPU."""


class _SignalStack(ctypes.Structure):
    _fields_ = (("address", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t))


@cache
def may_repack() -> bool:
    """Whether weights may be repacked for this CPU's vector units (`llama_model_params.use_extra_bufts`).

    llama.cpp lists its layouts once a process, AMX's first where Linux lets it use AMX. So they are listed here while
    Linux does not: it refuses AMX to a process with a thread whose alternate signal stack could not hold the registers
    (Documentation/arch/x86/xstate.rst). False: AMX is among them all the same, because the process has asked for it
    before (torch does).
    """
    with _refusing_amx(), _unheard():
        names = _layouts()
    return "AMX" not in names


@contextmanager
def _refusing_amx() -> Iterator[None]:
    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        yield
        return
    set_stack = ctypes.CDLL(None).sigaltstack
    memory = ctypes.create_string_buffer(_ALTERNATE_STACK)
    before = _SignalStack()
    set_stack(ctypes.byref(_SignalStack(ctypes.addressof(memory), 0, _ALTERNATE_STACK)), ctypes.byref(before))
    try:
        yield
    finally:
        set_stack(ctypes.byref(before), None)


@contextmanager
def _unheard() -> Iterator[None]:
    """llama.cpp writes to stderr that AMX is not there."""
    stderr, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)
        os.close(nowhere)


def _layouts() -> list[str]:
    """Names of the kinds of memory, beside plain memory, that llama.cpp's CPU backend keeps weights in."""
    device = _function("ggml_backend_dev_by_type", ctypes.c_void_p, ctypes.c_int)(_CPU)
    registry = _function("ggml_backend_dev_backend_reg", ctypes.c_void_p, ctypes.c_void_p)(device)
    find = _function("ggml_backend_reg_get_proc_address", ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)
    address = find(registry, b"ggml_backend_dev_get_extra_bufts")
    listed = ctypes.CFUNCTYPE(ctypes.POINTER(ctypes.c_void_p), ctypes.c_void_p)(address)(device)
    name = _function("ggml_backend_buft_name", ctypes.c_char_p, ctypes.c_void_p)
    return [name(each).decode() for each in takewhile(bool, listed)]


def _function(name: str, result: Any, *arguments: Any) -> Any:
    function = libggml[name]
    function.restype, function.argtypes = result, arguments
    return function
