"""A library with arrays on a GPU, as PyTorch and CuPy are two, on the fake driver of ``cuda-backend/fake``.

For scripts of processes that have found the fake ``libcuda.so.1``: see ``gpu_processes.py``.
"""

import ctypes as c
import threading
import time
import types

import numpy as np

_driver = c.CDLL("libcuda.so.1")
_driver.kyklos_fake_copied.restype = c.c_ulonglong
_python = c.pythonapi
_python.PyCapsule_New.restype = c.py_object
_python.PyCapsule_New.argtypes = [c.c_void_p, c.c_char_p, c.c_void_p]
_python.PyCapsule_GetPointer.restype = c.c_void_p
_python.PyCapsule_GetPointer.argtypes = [c.py_object, c.c_char_p]
_python.PyCapsule_SetName.argtypes = [c.py_object, c.c_char_p]

_TYPES = {np.dtype(np.float32): (2, 32), np.dtype(np.float16): (2, 16), np.dtype(np.float64): (2, 64)}


class _Device(c.Structure):
    _fields_ = [("type", c.c_int32), ("id", c.c_int32)]


class _Tensor(c.Structure):
    _fields_ = [
        ("data", c.c_void_p),
        ("device", _Device),
        ("ndim", c.c_int32),
        ("code", c.c_uint8),
        ("bits", c.c_uint8),
        ("lanes", c.c_uint16),
        ("shape", c.POINTER(c.c_int64)),
        ("strides", c.POINTER(c.c_int64)),
        ("byte_offset", c.c_uint64),
    ]


_Deleter = c.CFUNCTYPE(None, c.c_void_p)


class _Managed(c.Structure):
    _fields_ = [
        ("major", c.c_uint32),
        ("minor", c.c_uint32),
        ("context", c.c_void_p),
        ("deleter", _Deleter),
        ("flags", c.c_uint64),
        ("tensor", _Tensor),
    ]


def call(name, *arguments):
    code = getattr(_driver, name)(*arguments)
    assert code == 0, f"{name}: {code}"


def copied(only_to_host=False):
    """Bytes that Kyklos has copied between host and device memory so far: both ways, or to the host."""
    return _driver.kyklos_fake_copied(c.c_bool(only_to_host))


class Gpu:
    """The primary context of a device, for the threads of this process."""

    def __init__(self, number=0):
        self.number, self.handle = number, c.c_void_p()
        call("cuInit", 0)
        call("cuDevicePrimaryCtxRetain", c.byref(self.handle), number)

    def __call__(self, name, *arguments):
        """A function of the driver, in this context."""
        call("cuCtxPushCurrent_v2", self.handle)
        try:
            call(name, *arguments)
        finally:
            call("cuCtxPopCurrent_v2", c.byref(c.c_void_p()))

    def free_bytes(self):
        free, total = c.c_size_t(), c.c_size_t()
        self("cuMemGetInfo_v2", c.byref(free), c.byref(total))
        return free.value

    def close(self):
        call("cuDevicePrimaryCtxRelease_v2", self.number)


class Stream:
    def __init__(self, gpu):
        self.gpu, self.handle = gpu, c.c_void_p()
        gpu("cuStreamCreate", c.byref(self.handle), 0)
        self._pinned = []

    def upload(self, values, address):
        """Begins to copy an array of NumPy to the device."""
        self.gpu("cuMemcpyHtoDAsync_v2", c.c_uint64(address), self._host(values), c.c_size_t(values.nbytes), self.handle)

    def download(self, address, count, dtype):
        """Begins to copy elements to the host. A function that gives them once the stream is synchronised."""
        into = self._host(np.zeros(max(count, 1), dtype))
        nbytes = count * np.dtype(dtype).itemsize
        if nbytes:
            self.gpu("cuMemcpyDtoHAsync_v2", into, c.c_uint64(address), c.c_size_t(nbytes), self.handle)
        return lambda: np.frombuffer(c.string_at(into, nbytes), dtype)

    def busy(self):
        """Work that takes this stream a while."""
        memory = c.c_uint64()
        self.gpu("cuMemAlloc_v2", c.byref(memory), c.c_size_t(64))
        for _ in range(20):
            self.upload(np.zeros(16, np.float32), memory.value)
        self._pinned.append((None, memory))

    def wait_for(self, other):
        event = c.c_void_p()
        self.gpu("cuEventCreate", c.byref(event), 2)
        self.gpu("cuEventRecord", event, other.handle)
        self.gpu("cuStreamWaitEvent", self.handle, event, 0)
        self.gpu("cuEventDestroy_v2", event)

    def synchronize(self):
        self.gpu("cuStreamSynchronize", self.handle)

    def close(self):
        self.synchronize()
        for pinned, memory in self._pinned:
            if pinned is None:
                self.gpu("cuMemFree_v2", memory)
            else:
                self.gpu("cuMemFreeHost", pinned)
        self.gpu("cuStreamDestroy_v2", self.handle)

    def _host(self, values):
        pinned = c.c_void_p()
        self.gpu("cuMemHostAlloc", c.byref(pinned), c.c_size_t(values.nbytes), 0)
        c.memmove(pinned, np.ascontiguousarray(values).ctypes.data, values.nbytes)
        self._pinned.append((pinned, None))
        return pinned


class _Storage:
    """Memory of a device, until nobody refers to it any more."""

    live = 0
    _lock = threading.Lock()

    def __init__(self, gpu, nbytes):
        self.gpu, self.address = gpu, c.c_uint64()
        gpu("cuMemAlloc_v2", c.byref(self.address), c.c_size_t(nbytes))
        with _Storage._lock:
            _Storage.live += 1

    def __del__(self):
        self.gpu("cuMemFree_v2", self.address)
        with _Storage._lock:
            _Storage.live -= 1


def freed(gpu):
    """Memory that is none any more."""
    storage = _Storage(gpu, 4096)
    return types.SimpleNamespace(address=c.c_uint64(storage.address.value))


def live():
    """Arrays whose memory is not free."""
    return _Storage.live


def wait_until_given_back():
    """Waits until Kyklos has given back all arrays. When a call returns, it has; of a call that fails, a thread of Kyklos does it later."""
    end = time.monotonic() + 20
    while live() > 0:
        assert time.monotonic() < end, f"{live()} arrays are not given back"
        time.sleep(0.001)


_exported = {}


@_Deleter
def _release(address):
    del _exported[address]


class Array:
    """An array on a GPU whose elements ``stream`` writes."""

    def __init__(self, storage, stream, shape, strides, dtype, first=0):
        self.storage, self.stream, self.first = storage, stream, first
        self.shape, self.strides, self.dtype = tuple(shape), tuple(strides), np.dtype(dtype)
        self.requests = []

    @classmethod
    def of(cls, values, stream, late=True):
        """The elements of an array of NumPy, with its strides. ``late``: after other work of the stream."""
        whole = values if values.base is None else values.base
        storage = _Storage(stream.gpu, max(whole.nbytes, 64))
        if late:
            stream.busy()
        if whole.nbytes:
            stream.upload(whole, storage.address.value)
        first = (values.ctypes.data - whole.ctypes.data) // values.itemsize
        return cls(storage, stream, values.shape, [s // values.itemsize for s in values.strides], values.dtype, first)

    def __dlpack_device__(self):
        return (2, self.stream.gpu.number)

    def __dlpack__(self, *, stream=None, max_version=None, dl_device=None, copy=None):
        self.requests.append(stream)
        assert max_version is not None and stream not in (None, 0)
        if stream != -1:
            consumer = Stream.__new__(Stream)
            consumer.gpu, consumer.handle = self.stream.gpu, c.c_void_p(None if stream == 1 else stream)
            consumer.wait_for(self.stream)
        return _python.PyCapsule_New(self.managed(), b"dltensor_versioned", None)

    def managed(self):
        """The address of a new managed tensor, which keeps the memory."""
        code, bits = _TYPES[self.dtype]
        axes = c.c_int64 * len(self.shape)
        shape, strides = axes(*self.shape), axes(*self.strides)
        managed = _Managed(major=1, minor=0, deleter=_release)
        managed.tensor = _Tensor(
            data=self.storage.address.value,
            device=_Device(2, self.stream.gpu.number),
            ndim=len(self.shape),
            code=code,
            bits=bits,
            lanes=1,
            shape=shape,
            strides=strides,
            byte_offset=self.first * self.dtype.itemsize,
        )
        _exported[c.addressof(managed)] = (managed, shape, strides, self.storage)
        return c.addressof(managed)


class _Exchange(c.Structure):
    """DLPack's C Exchange API, by which PyTorch gives tensors and its current stream."""

    FROM_OBJECT = c.CFUNCTYPE(c.c_int, c.py_object, c.POINTER(c.c_void_p))
    VIEW_OF_OBJECT = c.CFUNCTYPE(c.c_int, c.py_object, c.POINTER(_Tensor))
    WORK_STREAM = c.CFUNCTYPE(c.c_int, c.c_int32, c.c_int32, c.POINTER(c.c_void_p))
    _fields_ = [
        ("major", c.c_uint32),
        ("minor", c.c_uint32),
        ("previous", c.c_void_p),
        ("allocator", c.c_void_p),
        ("from_object", FROM_OBJECT),
        ("to_object", c.c_void_p),
        ("view_of_object", VIEW_OF_OBJECT),
        ("work_stream", WORK_STREAM),
    ]


_thread = threading.local()


@_Exchange.FROM_OBJECT
def _from_object(array, out):
    out[0] = array.managed()
    return 0


@_Exchange.VIEW_OF_OBJECT
def _view_of_object(array, out):
    array.view = _Managed.from_address(array.managed())
    out[0] = array.view.tensor
    array.kept = _exported.pop(c.addressof(array.view))
    return 0


@_Exchange.WORK_STREAM
def _work_stream(kind, number, out):
    assert kind == 2
    out[0] = _thread.stream.handle.value
    return 0


_EXCHANGE = b"dlpack_exchange_api"
_exchange = _Exchange(1, 3, None, None, _from_object, None, _view_of_object, _work_stream)


class LikeTorch(Array):
    """An array whose elements are ready on the thread's current stream, which is that of the last array made."""

    __dlpack_c_exchange_api__ = _python.PyCapsule_New(c.addressof(_exchange), _EXCHANGE, None)

    def __init__(self, storage, stream, *rest, **named):
        super().__init__(storage, stream, *rest, **named)
        _thread.stream = stream


class Taken:
    """An array of Kyklos, taken by DLPack. ``stream`` reads it."""

    def __init__(self, array, stream):
        kind, number = array.__dlpack_device__()
        assert (kind, number) == (2, stream.gpu.number)
        capsule = array.__dlpack__(stream=stream.handle.value, max_version=(1, 0))
        self.address = _python.PyCapsule_GetPointer(capsule, b"dltensor_versioned")
        _python.PyCapsule_SetName(capsule, _USED)
        self.managed, self.stream = _Managed.from_address(self.address), stream
        tensor = self.managed.tensor
        assert (tensor.device.type, tensor.device.id) == (2, stream.gpu.number)
        self.shape = tuple(tensor.shape[: tensor.ndim])
        self.strides = tuple(tensor.strides[: tensor.ndim])
        self.dtype = next(dtype for dtype, kind in _TYPES.items() if kind == (tensor.code, tensor.bits))

    def read(self):
        """Begins to read the elements. A function that gives them once the stream is synchronised."""
        tensor = self.managed.tensor
        count = int(np.prod(self.shape))
        elements = self.stream.download((tensor.data or 0) + tensor.byte_offset, count, self.dtype)
        bytes_of = [stride * self.dtype.itemsize for stride in self.strides]
        return lambda: np.lib.stride_tricks.as_strided(elements(), self.shape, bytes_of).copy()

    def release(self):
        """Gives the array back, as libraries do it when the last reference is gone: while the stream may still read."""
        self.managed.deleter(self.address)


_USED = b"used_dltensor_versioned"


def read(array, stream):
    """Takes an array, reads it, gives it back and does not wait. A function that gives the elements later."""
    taken = Taken(array, stream)
    elements = taken.read()
    taken.release()
    return elements
