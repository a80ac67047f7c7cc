//! The decoders of this crate get a file or a variable with arbitrary bytes. They never panic. They
//! hold no more memory than the number of bytes justifies. The targets are the targets of `fuzz/`.

#[path = "../../fuzz/bounded.rs"]
mod bounded;

use bounded::{Limit, corpus, run};
use kyklos_launch::decoders::ALL;

/// The initial inputs of each target, as the documents show them.
fn made(target: &str) -> Vec<(String, Vec<u8>)> {
    let texts: &[(&str, &str)] = match target {
        "cluster_file" => &[
            (
                "three",
                "job = \"train\"\ncoordinator = \"a:1234\"\n[[ranks]]\nhost = \"a\"\n[[ranks]]\nhost = \"fd00::1\"\ndevice = \"wgpu:1\"\n",
            ),
            ("list", "ranks = [{ host = \"a\" }, { host = \"b\", device = \"cpu\" }]\n"),
        ],
        "nodelist" => &[("hosts", "node[01-03,7]-x[1-2],other"), ("tasks", "2(x3),1")],
        "environment" => &[
            (
                "torchrun",
                "RANK=5\nWORLD_SIZE=8\nLOCAL_RANK=1\nLOCAL_WORLD_SIZE=4\nMASTER_ADDR=a\nMASTER_PORT=29500\nKYKLOS_JOB_ID=train",
            ),
            (
                "slurm",
                "SLURM_JOB_ID=4007\nSLURM_STEP_ID=0\nSLURM_PROCID=4\nSLURM_LOCALID=1\nSLURM_STEP_NUM_TASKS=5\nSLURM_NODEID=1\nSLURMD_NODENAME=n2\nSLURM_STEP_NODELIST=n[1-2]\nSLURM_STEP_TASKS_PER_NODE=3,2\nSLURM_DISTRIBUTION=block",
            ),
            ("kubernetes", "JOB_COMPLETION_INDEX=2\nKYKLOS_WORLD=4\nKYKLOS_COORDINATOR=train-0.train:29600"),
            (
                "mpi",
                "OMPI_COMM_WORLD_RANK=1\nOMPI_COMM_WORLD_SIZE=2\nPMI_RANK=1\nPMI_SIZE=2\nKYKLOS_COORDINATOR=[fd00::1]:29600",
            ),
        ],
        other => panic!("{other} has no corpus"),
    };
    texts.iter().map(|(name, text)| ((*name).to_owned(), text.as_bytes().to_vec())).collect()
}

/// The memory limit of a target.
fn limit(target: &str) -> Limit {
    match target {
        // At most 4096 hosts of at most 253 letters each, several times.
        "nodelist" => Limit { fixed: 8 << 20, per_byte: 64 },
        "environment" => Limit { fixed: 2 << 20, per_byte: 64 },
        _ => Limit { fixed: 64 << 10, per_byte: 256 },
    }
}

#[test]
fn files_and_variables_of_any_bytes() {
    for (name, target) in ALL {
        let times = run(name, &corpus(name, &made(name)), limit(name), target);
        println!("{name}: {times} calls");
        assert!(times > 100, "{name}: {times}");
    }
}
