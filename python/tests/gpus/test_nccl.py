"""Messages between GPUs by NCCL, on the fake driver and the fake NCCL."""

from gpu_processes import ended, run, start

import kyklos
from kyklos._kyklos import free_port


def test_ranks_exchange_messages_by_nccl_and_without_it():
    out = run(
        """
    def main():
        def work(gpu, stream):
            other = fake.Gpu(1)
            def rank(group):
                gpus = gpu, other
                own = fake.Stream(gpus[group.rank])
                results = []
                for options in ({"strategy": "ring"}, {"mesh": "2x1"}):
                    arrays = [fake.Array.of(x, own) for x in states(group.rank)]
                    o, lse = group.attend(*arrays, mask="causal", **options)
                    gradients = group.backward(*arrays, o, lse, o, mask="causal", **options)
                    reads = [fake.read(x, own) for x in (o, lse, gradients.dq, gradients.dk, gradients.dv)]
                    own.synchronize()
                    results += [x() for x in reads]
                    del o, lse, arrays, gradients
                own.close()
                return group.collective, results
            devices, found = ["cuda:0", "cuda:1"], []
            for collective in ("host", "nccl", "auto"):
                before = fake.copied(only_to_host=True)
                words, results = zip(*kyklos.run_local(2, rank, device=devices, collective=collective))
                assert words == (("host memory" if collective == "host" else "NCCL 2.21.5"),) * 2, words
                # By NCCL no message passes through host memory.
                assert (fake.copied(only_to_host=True) > before) == (collective == "host")
                found.append(results)
            for results in found[1:]:
                for own, wanted in zip(results, found[0], strict=True):
                    for x, y in zip(own, wanted, strict=True):
                        same(x, y)
            other.close()
        on_gpu(work)
        assert fake.live() == 0
    """,
        cuda="devices=2",
        nccl="report=1",
    )
    assert out == ""


def test_why_nccl_is_not_used_is_told():
    run(
        """
    def main():
        def formed(words, device, **options):
            groups = kyklos.Group.local(len(device), device=device, **options)
            assert all(group.collective == words for group in groups), [group.collective for group in groups]
            for group in groups:
                group.close()
        cpu = kyklos.Group.local(1, device="cpu")[0].device
        # A rank on cores beside two GPUs, and beside one; two ranks on one GPU.
        formed("NCCL 2.21.5 between ranks 0, 2; through host memory from and to rank 1 (its device is %s, not a CUDA device)" % cpu,
               ["cuda:0", "cpu", "cuda:1"], collective="auto")
        alone = "NCCL is not used: rank 1: its device is %s, not a CUDA device" % cpu
        formed("host memory; " + alone, ["cuda:0", "cpu"], collective="auto")
        formed("host memory", ["cuda:0", "cpu"])
        form = kyklos.Group.local
        refused(alone + ': use collective="host", or "auto"', lambda: form(2, device=["cuda:0", "cpu"], collective="nccl"))
        refused("Duplicate GPU detected", lambda: form(2, device="cuda:0", collective="nccl"))
        assert {group.collective for group in form(2, device="cuda:0")} == {"the memory of one device"}
        refused('collective "rdma" is not known', lambda: form(2, device="cpu", collective="rdma"))
        refused("nccl_cluster without NCCL", lambda: form(2, device="cpu", nccl_cluster=1))
    """,
        cuda="devices=2",
    )


def test_without_nccl_the_gpus_of_a_process_copy_from_device_to_device():
    run(
        """
    def main():
        def rank(group):
            o, lse = group.attend(*states(group.rank), strategy="ring", mask="causal")
            return group.collective, o, lse
        found = []
        for collective, words in (("host", "host memory"), ("auto", "copies from device to device between ranks 0, 1; NCCL is not used: ")):
            ways, o, lse = zip(*kyklos.run_local(2, rank, device=["cuda:0", "cuda:1"], collective=collective))
            assert ways[0] == ways[1] and ways[0].startswith(words), ways
            found.append(o + lse)
        for own, wanted in zip(*found, strict=True):
            same(own, wanted)
    """,
        cuda="devices=2",
        nccl="version=21602",
    )


def test_processes_use_nccl_and_name_the_one_that_died():
    port = free_port("127.0.0.1")
    script = """
    def main():
        group = kyklos.Group.connect(PEM, rank=RANK, size=2, host="127.0.0.1", port=PORT, device="cuda:RANK", collective="nccl",
                                     nccl_cluster=3)
        assert group.collective == "NCCL 2.21.5", group.collective
        def work(gpu, stream):
            x = [fake.Array.of(x, stream) for x in states(RANK)]
            o, lse = group.attend(*x, strategy="ring")
            found = fake.read(o, stream)
            stream.synchronize()
            print(np.isfinite(found()).all())
            sys.stdout.flush()
            del o, lse
            try:
                group.attend(*x, strategy="ring")
            except kyklos.GroupError as error:
                assert error.peer == 1 or "rank 1" in str(error), error
                print("rank 1 has died")
            del x
            # Until then the message that rank 1 did not take keeps what it would send.
            group.close()
            fake.wait_until_given_back()
        on_gpu(work, RANK)
    """
    running = []
    for rank, pem in enumerate(kyklos.identities(2)):
        own = script.replace("PEM", repr(pem)).replace("RANK", str(rank)).replace("PORT", str(port))
        # The second exchange of rank 1 ends its process.
        running.append(start(own, cuda="devices=2", nccl="fault_rank=1,die_at=2"))
    (code, out, err), (died, _, _) = [ended(process) for process in running]
    assert (code, out.split("\n")[:2]) == (0, ["True", "rank 1 has died"]) and died != 0, (code, out, err)


def test_a_message_that_does_not_end_in_time_names_the_peer():
    out = run(
        """
    def main():
        def rank(group):
            # Of two ranks, rank 1 stays in its first exchange.
            try:
                group.attend(*states(group.rank), strategy="ring")
            except kyklos.GroupError as error:
                return error.peer, error.operation, str(error)
        peers = []
        for peer, operation, text in kyklos.run_local(2, rank, device=["cuda:0", "cuda:1"], collective="nccl", deadline_s=10):
            assert operation is not None, text
            peers.append(peer)
        # A rank that learns of it from the other names the rank that the other waited for.
        print(sorted(set(peers) - {None}))
    """,
        cuda="devices=2",
        nccl="fault_rank=1,hang_at=1",
    )
    assert out.strip() in ("[0]", "[1]", "[0, 1]"), out


def test_messages_with_several_peers_that_do_not_end_in_time_name_them_all():
    run(
        """
    def main():
        def rank(group):
            # In a ring of three, rank 1 stays in its first exchange.
            try:
                group.attend(*[made(0, heads, tokens=6) for heads in (4, 2, 2)], strategy="ring")
            except kyklos.GroupError as error:
                return error.peer, error.peers, str(error)
        devices = ["cuda:0", "cuda:1", "cuda:2"]
        found = kyklos.run_local(3, rank, device=devices, collective="nccl", deadline_s=10)
        late = [(rank, peer, peers) for rank, (peer, peers, _) in enumerate(found) if peers]
        assert late, found
        for rank, peer, peers in late:
            assert peer is None and sorted((rank, *peers)) == [0, 1, 2], found
    """,
        cuda="devices=3",
        nccl="fault_rank=1,hang_at=1",
    )
