"""Arrays on NVIDIA GPUs, on the fake driver: its device is an emulator, each of its streams a thread that sleeps at random, and new
memory is NaN. It ends a process that uses freed memory, or that leaves something behind."""

import pytest
from gpu_processes import ended, run, start

LAYERS = """
def main():
    def work(gpu, stream):
        layers = [lambda rank, layer=layer: [x + layer for x in states(rank)] for layer in range(4)]
        found, before = {}, (fake.copied(), fake.copied(only_to_host=True))
        def with_arrays_of_the_gpu(group):
            writer, reader = fake.Stream(gpu), fake.Stream(gpu)
            found[group.rank] = []
            # By the protocol in Python, and by the one in C.
            array = [fake.Array, fake.LikeTorch][group.rank]
            for layer in layers:
                arrays = [array.of(x, writer) for x in layer(group.rank)]
                results = group.attend(*arrays, mask="causal", mesh="2x1")
                # Kyklos names a stream of its own, before which the library orders what writes the elements.
                assert all(request > 2 for x in arrays for request in x.requests)
                assert all(len(x.requests) == 1 - group.rank for x in arrays)
                # Nobody waits: results are given back while this stream has not read them.
                found[group.rank].append([fake.read(x, reader) for x in results])
                del arrays, results
            reader.synchronize()
            found[group.rank] = [[x() for x in results] for results in found[group.rank]]
            writer.close()
            reader.close()
        def with_arrays_of_the_host(group):
            return [group.attend(*layer(group.rank), mask="causal", mesh="2x1") for layer in layers]
        kyklos.run_local(2, with_arrays_of_the_gpu, device="cuda:0")
        assert fake.copied(only_to_host=True) == before[1]
        # Lists of work, no elements: those of q, k and v have 69632 bytes.
        assert fake.copied() - before[0] < 8192, fake.copied() - before[0]
        wanted = kyklos.run_local(2, with_arrays_of_the_host, device="cuda:0")
        for rank in (0, 1):
            for own, other in zip(found[rank], wanted[rank], strict=True):
                for x, y in zip(own, other, strict=True):
                    same(x, y)
    on_gpu(work)
    assert fake.live() == 0
"""


def test_arrays_of_two_ranks_stay_on_the_gpu_and_give_the_bytes_of_arrays_in_host_memory():
    run(LAYERS, cuda="delay_us=2000")


@pytest.mark.parametrize(("bit", "who"), [(1, "Kyklos"), (2, "the library")])
def test_a_stream_that_does_not_wait_is_noticed(bit, who):
    # One of two seeds shows it.
    running = [start(LAYERS, cuda=f"ignore_caller_waits={bit},delay_us=10000,seed={seed}") for seed in (1, 2)]
    assert any(ended(process)[0] != 0 for process in running), who


def test_gradients_stay_on_the_gpu():
    run("""
    def main():
        def work(gpu, stream):
            def rank(group):
                for dtype, options in ((np.float32, {"mask": "causal"}), (np.float16, {"layout": "bhsd"})):
                    own = fake.Stream(gpu)
                    host = [*states(group.rank, dtype), made(group.rank, 4, dtype=dtype)]
                    if "layout" in options:
                        host = [np.ascontiguousarray(x.transpose(0, 2, 1, 3)) for x in host]
                    q, k, v, d_o = (fake.Array.of(x, own) for x in host)
                    o, lse = group.attend(q, k, v, **options)
                    # Arrays of Kyklos are arrays, too.
                    gradients = group.backward(q, k, v, o, lse, d_o, lse, **options)
                    reads = [fake.read(x, own) for x in (gradients.dq, gradients.dk, gradients.dv)]
                    del q, k, v, d_o, o, lse, gradients
                    own.synchronize()
                    q, k, v, d_o = host
                    o, lse = group.attend(q, k, v, **options)
                    wanted = group.backward(q, k, v, o, lse, d_o, lse, **options)
                    for x, y in zip(reads, (wanted.dq, wanted.dk, wanted.dv), strict=True):
                        same(x(), y)
                    own.close()
            kyklos.run_local(2, rank, device="cuda:0")
            # With sinks, which have sums in host memory, and a bias, which has a gradient on the GPU.
            group = kyklos.Group.local(1, device="cuda:0")[0]
            host = states(0)
            q, k, v = (fake.Array.of(x, stream) for x in host)
            bias = np.ones((1, 9, 4, 9), np.float32)
            options = {"bias": bias, "sinks": [0.5, 0, 0, 1]}
            o, lse = group.attend(q, k, v, lse_pair=True, **options)
            before = fake.copied(only_to_host=True)
            gradients = group.backward(q, k, v, o, lse, o, **options, bias_gradient=True)
            # Sums of the sinks from four numbers of each row at most; dq has 4608 bytes.
            assert fake.copied(only_to_host=True) - before <= 9 * 4 * 4 * 4
            read = fake.read(gradients.d_bias, stream)
            stream.synchronize()
            o, lse = group.attend(*host, lse_pair=True, **options)
            wanted = group.backward(*host, o, lse, o, **options, bias_gradient=True)
            same(read(), wanted.d_bias)
            assert gradients.d_sinks_part == wanted.d_sinks_part
            group.close()
        on_gpu(work)
        assert fake.live() == 0
    """)


def test_a_bias_of_the_gpu_stays_there():
    run("""
    def main():
        def work(gpu, stream):
            def rank(group):
                rng = np.random.default_rng(group.rank)
                for dtype, layout, heads, strategy in ((np.float32, "bshd", 4, {}), (np.float16, "bhsd", 1, {}), (np.float16, "bshd", 4, {"mesh": "2x1"})):
                    own = fake.Stream(gpu)
                    host = list(states(group.rank, dtype))
                    bias = rng.standard_normal((1, host[0].shape[1], heads, 14)).astype(dtype)
                    bias[..., 3] = -np.inf
                    if layout == "bhsd":
                        host, bias = ([np.ascontiguousarray(x.transpose(0, 2, 1, 3)) for x in given] for given in (host, [bias]))
                        bias, = bias
                    options = {"mask": "causal", "layout": layout, **strategy}
                    arrays = [fake.Array.of(x, own) for x in host]
                    wanted = group.attend(*arrays, bias=bias, **options)
                    there = fake.Array.of(bias, own)
                    found = group.attend(*arrays, bias=there, **options)
                    # The call has read it: other elements now change nothing.
                    own.upload(np.full_like(bias, 9), there.storage.address.value)
                    gradients = [
                        group.backward(*arrays, *result, result[0], bias=given, bias_gradient=True, **options)
                        for result, given in ((wanted, bias), (found, fake.Array.of(bias, own)))
                    ]
                    both = (*wanted, gradients[0].dq, gradients[0].dk, gradients[0].d_bias), (*found, gradients[1].dq, gradients[1].dk, gradients[1].d_bias)
                    reads = [[fake.read(x, own) for x in one] for one in both]
                    own.synchronize()
                    for x, y in zip(*reads, strict=True):
                        same(x(), y())
                    del arrays, there, found, wanted, gradients, both, reads
                    own.close()
            kyklos.run_local(2, rank, device="cuda:0")
            group = kyklos.Group.local(1, device="cuda:0")[0]
            arrays = [fake.Array.of(x, stream) for x in states(0)]
            bias = np.ones((1, 9, 4, 9), np.float32)
            there, copied = fake.Array.of(bias, stream), []
            for given in (bias, there, bias, there):
                before = fake.copied()
                group.attend(*arrays, bias=given)
                copied.append(fake.copied() - before)
            # What else is copied, such as lists of tiles, is the same.
            assert copied[2] - copied[3] == bias.nbytes, copied
            del arrays, there
            group.close()
        on_gpu(work)
        assert fake.live() == 0
    """)


def test_a_cache_takes_keys_of_the_gpu():
    run("""
    def main():
        def work(gpu, stream):
            found = {}
            def rank(group, of):
                own = fake.Stream(gpu)
                results = []
                caches = [group.kv_cache(heads=2, dim=32) for _ in range(2)]
                for cache in caches:
                    results.append(group.attend_cached(cache, *(of(x, own) for x in states(group.rank)), mask="causal"))
                token = [made(0, heads, tokens=1) for heads in (4, 2, 2)]
                shared = {"mask": "causal", "same_queries": True}
                arrays = [of(x, own) for x in token]
                with group.cached_calls(caches, *arrays, **shared) as layers:
                    results += [layers.attend(*arrays) for _ in caches]
                if of == fake.Array.of:
                    reads = [fake.read(x, own) for result in results for x in result]
                    own.synchronize()
                    results = [x() for x in reads]
                else:
                    results = [x for result in results for x in result]
                found.setdefault(group.rank, []).append(results)
                del arrays
                own.close()
            for of in (fake.Array.of, lambda x, _: x):
                before = fake.copied(only_to_host=True)
                kyklos.run_local(2, lambda group: rank(group, of), device="cuda:0")
                # Of arrays in host memory the results at least are copied.
                assert (fake.copied(only_to_host=True) == before) == (of == fake.Array.of)
            for own, other in found.values():
                for x, y in zip(own, other, strict=True):
                    same(x, y)
        on_gpu(work)
        assert fake.live() == 0
    """)


def test_memory_of_results_is_used_again_after_what_the_stream_had_been_given():
    run(
        """
    def main():
        def work(gpu, stream):
            group = kyklos.Group.local(1, device="cuda:0")[0]
            reader = fake.Stream(gpu)
            one = made(0, 1, tokens=1)
            arrays = [fake.Array.of(one + number, stream, late=False) for number in range(6)]
            found = []
            for x in arrays:
                reader.busy()
                o, _ = group.attend(x, x, x)
                # Given back at once; the stream reads it while the next calls want memory for their results.
                found.append(fake.read(o, reader))
                del o, _
            reader.synchronize()
            for number, x in enumerate(found):
                same(x(), one + number)
            group.close()
            reader.close()
        on_gpu(work)
    """,
        cuda="delay_us=9000",
    )


def test_many_calls_leave_nothing_behind():
    run("""
    def main():
        def work(gpu, stream):
            group = kyklos.Group.local(1, device="cuda:0")[0]
            x = fake.Array.of(made(0, 1, tokens=2), stream)
            free = []
            for _ in range(60):
                o, lse = group.attend(x, x, x)
                taken = fake.Taken(o, stream)
                wanted = taken.read()
                o.__dlpack__(stream=1, max_version=(1, 0))  # Never taken.
                taken.release()
                del o, lse
                if len(free) % 10 == 9:
                    # What is under way keeps its memory.
                    stream.synchronize()
                free.append(gpu.free_bytes())
            # A leak takes 512 bytes of each call. Now and then a call needs more memory, because what it would use again is not idle yet.
            assert free[19] - free[-1] < 10 * 512, free
            # A result outlives the group.
            o, lse = group.attend(x, x, x)
            group.close()
            del group, lse
            read = fake.read(o, stream)
            stream.synchronize()
            same(read(), wanted())
        on_gpu(work)
        assert fake.live() == 0
    """)


def test_a_peer_that_fails_leaves_the_arrays_of_the_others_alone():
    run("""
    def main():
        def work(gpu, stream):
            def rank(group):
                own = fake.Stream(gpu)
                x = [fake.Array.of(x, own) for x in states(group.rank)]
                if group.rank == 1:
                    refused("this rank has no tokens", lambda: (_ for _ in ()).throw(
                        group.refuse("this rank has no tokens", "wait for them")))
                else:
                    refused("this rank has no tokens", lambda: group.attend(*x))
                # The group goes on, until a rank ends it.
                o, lse = group.attend(*x)
                del o, lse
                if group.rank == 1:
                    group.abort("out of patience")
                try:
                    group.attend(*x)
                    raise AssertionError("no error")
                except kyklos.GroupError as error:
                    assert "out of patience" in str(error), error
                    del error
                del x
                own.close()
            kyklos.run_local(2, rank, device="cuda:0")
            fake.wait_until_given_back()
        on_gpu(work)
    """)


def test_layouts_types_and_parts_of_arrays():
    run("""
    def main():
        def work(gpu, stream):
            group = kyklos.Group.local(1, device="cuda:0")[0]
            def check(views, **options):
                arrays = [fake.Array.of(x, stream) for x in views]
                found = [fake.read(x, stream) for x in group.attend(*arrays, **options)]
                stream.synchronize()
                for x, y in zip(found, group.attend(*(np.ascontiguousarray(x) for x in views), **options), strict=True):
                    same(x(), y)
            for dtype in (np.float32, np.float16):
                check(states(0, dtype), mask="causal")
            # Heads before tokens; a part of packed q, k and v; every second token; no queries.
            check([np.ascontiguousarray(x.transpose(0, 2, 1, 3)) for x in states(0)], layout="bhsd")
            packed = made(1, 6)
            check([packed[:, :, 0:2], packed[:, :, 2:4], packed[:, :, 4:6]])
            check([x[:, ::2] for x in states(0)])
            q, k, v = states(0)
            o, lse = group.attend(*(fake.Array.of(x, stream) for x in (q[:, :0].copy(), k, v)))
            assert fake.read(o, stream)().shape == (1, 0, 4, 32) and fake.read(lse, stream)().shape == (1, 0, 4)
            # Queries on the GPU and keys in host memory, and the other way round: the result is where q is.
            wanted = group.attend(q, k, v)[0]
            o, _ = group.attend(fake.Array.of(q, stream), k, v)
            o = fake.read(o, stream)
            stream.synchronize()
            same(o(), wanted)
            same(group.attend(q, fake.Array.of(k, stream), fake.Array.of(v, stream))[0], wanted)
            assert group._core.gpu == 0
            group.close()
        on_gpu(work)
        assert fake.live() == 0
    """)


def test_what_cannot_be_read_is_refused_before_it_is_read_and_the_group_goes_on():
    run(
        """
    def main():
        def work(gpu, stream):
            other = fake.Gpu(1)
            elsewhere = fake.Stream(other)
            q, k, v = states(0)
            group = kyklos.Group.local(1, device="cuda:0")[0]
            here = [fake.Array.of(x, stream) for x in (q, k, v)]
            before = fake.copied()
            there = fake.Array.of(q, elsewhere)
            words = "q is on cuda:1, and this rank computes on cuda:0: move it to host memory, or form the group with device=\\"cuda:1\\""
            refused(words, lambda: group.attend(there, *here[1:]))
            assert there.requests == []
            refused("elements of float64", lambda: group.attend(fake.Array.of(q.astype(np.float64), stream), *here[1:]))
            refused("key_bias is on cuda:0: move it to host memory", lambda: group.attend(*here, key_bias=here[0]))
            odd = fake.Array.of(np.ones((1, 9, 4, 9), np.float16), stream)
            halves = [fake.Array.of(x.astype(np.float16), stream) for x in (q, k, v)]
            refused("rows of 9 keys in f16", lambda: group.attend(*halves, bias=odd))
            even = fake.Array.of(np.ones((1, 9, 4, 10), np.float16), stream)
            refused("bias of f16 for q of f32", lambda: group.attend(*here, bias=even))
            del odd, even, halves
            repeated = fake.Array(here[1].storage, stream, (1, 9, 2, 32), (0, 64, 0, 1), np.float32)
            refused("k: ", lambda: group.attend(here[0], repeated, here[2]))
            odd = fake.Array(here[1].storage, stream, (1, 4, 2, 32), (256, 64, 32, 1), np.float32, first=1)
            refused("no multiple of 16", lambda: group.attend(here[0], odd, odd))
            outside = fake.Array(here[1].storage, stream, (1, 4000, 2, 32), (256000, 64, 32, 1), np.float32)
            refused("are allocated", lambda: group.attend(here[0], outside, outside))
            capsule = here[0].__dlpack__(stream=-1, max_version=(1, 0))
            refused("capsule of DLPack with an array of a GPU", lambda: group.attend(capsule, *here[1:]))
            assert fake.copied() == before
            o, _ = group.attend(*here)
            refused("lse has the shape [1, 9, 4, 1]", lambda: group.backward(
                *here, o, fake.Array(here[0].storage, stream, (1, 9, 4, 1), (36, 4, 1, 1), np.float32), o))
            # What a library must not ask for, and what it may.
            for wrong in (0, -2):
                try:
                    o.__dlpack__(stream=wrong)
                except ValueError:
                    continue
                raise AssertionError("a stream that is none")
            del o
            cpu = kyklos.Group.local(1, device="cpu")[0]
            refused("q is on cuda:0, and this rank computes on", lambda: cpu.attend(*here))
            assert cpu._core.gpu is None
            gone = fake.Array(fake.freed(gpu), stream, (1, 9, 4, 32), (1152, 128, 32, 1), np.float32)
            refused("which the driver does not know", lambda: group.attend(gone, *here[1:]))
            for one in (group, cpu):
                one.close()
            del here, there, gone, repeated, odd, outside, capsule
            fake.wait_until_given_back()
            elsewhere.close()
            other.close()
        on_gpu(work)
    """,
        cuda="devices=2",
    )


def test_ranks_on_pytorch_and_on_cores_beside_an_nvidia_gpu():
    pytest.importorskip("torch")
    run(
        """
    def main():
        import torch, kyklos.torch
        q, k, v = (torch.from_numpy(made(0, heads, 30)).transpose(1, 2) for heads in (4, 2, 2))
        d_o = torch.from_numpy(made(1, 4, 30)).transpose(1, 2)
        def rank(group):
            own = slice(10 * group.rank, 10 * group.rank + 10)
            leaves = [x[:, :, own].clone().requires_grad_() for x in (q, k, v)]
            o, _ = kyklos.torch.attention(*leaves, group, mask="causal")
            return o.detach(), *torch.autograd.grad(o, leaves, d_o[:, :, own])
        found = kyklos.run_local(3, rank, device=["cuda:0", "torch:cpu", "cpu"])
        leaves = [x.double().requires_grad_() for x in (q, k, v)]
        right = torch.nn.functional.scaled_dot_product_attention(*leaves, is_causal=True, enable_gqa=True)
        right = right, *torch.autograd.grad(right, leaves, d_o.double())
        for own, other in zip(zip(*found, strict=True), right, strict=True):
            error = (torch.cat(own, 2) - other).abs().max()
            # Sums of the GPU's matrix units are of numbers that are rounded to 11 bits.
            assert error <= 4e-3 * other.abs().max(), error
    """
    )
