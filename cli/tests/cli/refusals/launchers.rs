//! Refusals of the ranks of several processes: options, variables of launchers, cluster files, identities.

use super::of_program;
use crate::support::transcript_holds;

#[test]
fn launchers() {
    transcript_holds("launchers", &of_program(COMMANDS));
}

const COMMANDS: &[&str] = &[
    "launch -n 2 -- devices",
    "launch -n 9999 -- ATTEND",
    "launch -n 2 -- ATTEND --ranks 2",
    "launch -n 2 -- ATTEND --rank 0",
    "launch -n 2 -- ATTEND --transport in-process",
    "launch -n 2 -- ATTEND --on-loss rejoin --rejoin",
    "RANK=1 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=29600 ATTEND --identity DIR/ids/rank-1.pem --rejoin",
    "launch -n 4 -- ATTEND --mesh 2x2 --on-loss shrink",
    "ATTEND --ranks 2 --on-loss shrink",
    "ATTEND --ranks 2 --stuck-after 60",
    "ATTEND --ranks 2 --heartbeat 1000",
    "ATTEND --ranks 2 --link wan",
    "KYKLOS_LAUNCH=1 ATTEND --rank 0",
    "ATTEND --ranks 2 --rank 0",
    "RANK=0 ATTEND",
    "RANK=first WORLD_SIZE=2 ATTEND",
    "RANK=2 WORLD_SIZE=2 ATTEND",
    "RANK=0 WORLD_SIZE=2 ATTEND",
    "RANK=0 WORLD_SIZE=2 MASTER_ADDR=node1 ATTEND",
    "RANK=0 WORLD_SIZE=2 MASTER_ADDR=a/b MASTER_PORT=29600 ATTEND",
    "KYKLOS_WORLD=0 ATTEND --rank 0",
    "ATTEND --rank 0",
    "ATTEND --world 2",
    "ATTEND --rank 0 --world 2 --coordinator node1",
    "RANK=0 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=29600 ATTEND --rank 1",
    "RANK=0 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=29600 ATTEND",
    "ATTEND --rank 0 --world 2 --coordinator 127.0.0.1:29600 --identity DIR/{host}",
    "ATTEND --rank 1 --world 2 --coordinator 127.0.0.1:29600 --advertise node1",
    "KYKLOS_ADVERTISE=10.0.0.1,10.0.0.1:0 ATTEND --rank 1 --world 2 --coordinator 127.0.0.1:29600",
    "KYKLOS_SHARED_MEMORY=no ATTEND --rank 1 --world 2 --coordinator 127.0.0.1:29600",
    "ATTEND --rank 1 --world 2 --coordinator 127.0.0.1:29600 --advertise ::1,::2,::3,::4,::5,::6,::7,::8,::9",
    "RANK=1 WORLD_SIZE=2 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=29600 ATTEND --identity DIR/ids/rank-1.pem --port 65535",
    "KYKLOS_JOIN=x ATTEND --invite DIR/invitation",
    "ATTEND --invite DIR/invitation --identity DIR/ids/rank-0.pem",
    "ATTEND --join kyklos1.x",
    "KYKLOS_JOIN=x ATTEND --rejoin",
    "KYKLOS_IDENTITY=x KYKLOS_JOIN=x ATTEND",
    "KYKLOS_JOIN=kyklos1.0000000000000000000000000000000000000000000000000000000000000000.00000000000000000000000000000000@127.0.0.1:29600 ATTEND --identity DIR/ids/rank-1.pem",
    "certs invite --coordinator node1 --world 2",
    "SLURM_STEP_ID=0 SLURM_PROCID=1 ATTEND",
    "SLURM_STEP_ID=0 SLURM_PROCID=1 SLURM_NTASKS=2 SLURM_STEP_NODELIST=node[1 ATTEND",
    "SLURM_STEP_ID=0 SLURM_PROCID=1 SLURM_NTASKS=2 SLURM_STEP_NODELIST=a,b SLURM_STEP_TASKS_PER_NODE=x ATTEND",
    "JOB_COMPLETION_INDEX=0 KYKLOS_WORLD=2 KYKLOS_SERVICE=ring ATTEND",
    "ATTEND --rank 0 --cluster DIR/cluster-unknown-key",
    "ATTEND --rank 0 --cluster DIR/cluster-empty",
    "ATTEND --rank 0 --cluster DIR/cluster-host",
    "ATTEND --rank 0 --cluster DIR/cluster-device",
    "ATTEND --rank 0 --cluster DIR/cluster-long",
    "ATTEND --rank 0 --cluster DIR/cluster-one --device wgpu",
    "certs issue --ranks 3-1",
    "certs issue --authority DIR/authority --host a/b",
    "certs issue --authority DIR/authority --ranks 0 --output DIR/ids",
];
