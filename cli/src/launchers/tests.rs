use clap::Parser;

use super::*;

#[derive(Debug, Parser)]
struct Flags {
    #[command(flatten)]
    group: GroupArgs,
}

/// Flags and variables, both as an operator would write them.
fn read(flags: &str, variables: &str) -> Result<Option<Launched>> {
    let flags = Flags::try_parse_from(std::iter::once("kyklos").chain(flags.split_whitespace())).unwrap();
    let table: Vec<(&str, &str)> =
        variables.split_whitespace().map(|pair| pair.split_once('=').unwrap()).collect();
    let look_up =
        |name: &str| table.iter().find(|(key, _)| *key == name).map(|(_, value)| (*value).to_owned());
    find(&flags.group, &Variables::of(&look_up), None)
}

/// rank/world local rank/local world, address.
fn short(launched: Option<Launched>) -> String {
    let Some(launched) = launched else {
        return "alone".to_owned();
    };
    let Launched { rank, world, local_rank, local_world, coordinator, .. } = launched;
    let at = coordinator.map_or(String::new(), |address| format!(" {address}"));
    format!("{rank}/{world} {local_rank}/{local_world}{at}")
}

const SLURM: &str = "SLURM_JOB_ID=4007 SLURM_STEP_ID=0 SLURM_NTASKS=5 SLURM_STEP_NUM_TASKS=5 SLURM_NODEID=1 \
    SLURM_STEP_NODELIST=n[1-2] SLURM_STEP_TASKS_PER_NODE=3,2";
const AT: &str = "KYKLOS_COORDINATOR=h:1";

#[test]
fn tasks_that_cannot_all_be_ranks_take_no_room() {
    let places = |more: u32| {
        let (most, all) = (kyklos::MAX_WORLD - 1, kyklos::MAX_WORLD - 1 + more);
        let said = format!(
            "SLURM_STEP_ID=0 SLURM_PROCID=0 SLURM_NTASKS={all} SLURM_STEP_NODELIST=n[1-2] SLURM_STEP_TASKS_PER_NODE={most},{more}"
        );
        read("", &said).unwrap().unwrap().places.len()
    };
    assert_eq!([1, 2].map(places), [kyklos::MAX_WORLD as usize, 0]);
}

#[test]
fn every_launcher_is_read() {
    let slurm = |task: &str| format!("{SLURM} {task}");
    for (flags, variables, expected) in [
        ("", "", "alone"),
        ("", "LOCAL_RANK=3 MASTER_ADDR=a MASTER_PORT=1", "alone"),
        ("", AT, "alone"),
        (
            "",
            "RANK=5 WORLD_SIZE=8 LOCAL_RANK=1 LOCAL_WORLD_SIZE=4 MASTER_ADDR=a MASTER_PORT=29500",
            "5/8 1/4 a:29500",
        ),
        ("", "RANK=0 WORLD_SIZE=1", "0/1 0/1"),
        ("--rank 1 --world 3 --coordinator a:7", "", "1/3 0/1 a:7"),
        ("--rank 1", "KYKLOS_WORLD=3 KYKLOS_COORDINATOR=a:7", "1/3 0/1 a:7"),
        ("", &slurm("SLURM_PROCID=4 SLURM_LOCALID=1"), "4/5 1/2 n1:29607"),
        (
            "",
            &slurm("SLURM_PROCID=4 SLURM_LOCALID=1 SLURM_DISTRIBUTION=arbitrary KYKLOS_COORDINATOR=x:1"),
            "4/5 1/2 x:1",
        ),
        (
            "",
            "SLURM_PROCID=1 SLURM_NTASKS=2 SLURM_LOCALID=0 SLURM_NTASKS_PER_NODE=1 SLURM_JOB_NODELIST=b,a",
            "1/2 0/1 b:29600",
        ),
        ("--coordinator x:1", &slurm("SLURM_PROCID=0 SLURM_LOCALID=0"), "0/5 0/2 x:1"),
        ("", &slurm("SLURM_PROCID=0 SLURM_LOCALID=0 MASTER_ADDR=m MASTER_PORT=2"), "0/5 0/2 m:2"),
        (
            "",
            "JOB_COMPLETION_INDEX=2 KYKLOS_WORLD=4 HOSTNAME=ring-2 KYKLOS_SERVICE=ring.default",
            "2/4 0/1 ring-0.ring.default:29600",
        ),
        ("--world 4", "JOB_COMPLETION_INDEX=0 KYKLOS_COORDINATOR=ring-0.ring:7", "0/4 0/1 ring-0.ring:7"),
        (
            "",
            "OMPI_COMM_WORLD_RANK=3 OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_LOCAL_RANK=1 OMPI_COMM_WORLD_LOCAL_SIZE=2 KYKLOS_COORDINATOR=h:1",
            "3/4 1/2 h:1",
        ),
        (
            "",
            "PMI_RANK=3 PMI_SIZE=4 MPI_LOCALRANKID=1 MPI_LOCALNRANKS=2 KYKLOS_COORDINATOR=h:1",
            "3/4 1/2 h:1",
        ),
        // Shells in which nobody has started ranks.
        ("", "SLURM_NTASKS=4 SLURM_JOB_ID=1 SLURM_JOB_NODELIST=a", "alone"),
        ("", "SLURM_PROCID=0 SLURM_JOB_ID=1 SLURM_JOB_NODELIST=a", "alone"),
        ("", "SLURM_PROCID=0 SLURM_NTASKS=4 SLURM_STEP_ID=4294967291 SLURM_JOB_NODELIST=a", "alone"),
        ("", "RANK= WORLD_SIZE=", "alone"),
    ] {
        assert_eq!(short(read(flags, variables).unwrap()), expected, "{flags} | {variables}");
    }
}

#[test]
fn the_nearer_launcher_counts_and_the_same_twice_is_no_contradiction() {
    let slurm =
        |rest: &str| format!("SLURM_PROCID=1 SLURM_NTASKS=2 SLURM_LOCALID=0 SLURM_JOB_NODELIST=a,b {rest}");
    for (flags, variables, expected) in [
        // One torchrun or mpirun as a task on each host.
        (
            "",
            slurm("RANK=5 WORLD_SIZE=8 LOCAL_RANK=1 LOCAL_WORLD_SIZE=4 MASTER_ADDR=a MASTER_PORT=3"),
            "5/8 1/4 a:3",
        ),
        (
            "",
            slurm(
                "OMPI_COMM_WORLD_RANK=5 OMPI_COMM_WORLD_SIZE=8 OMPI_COMM_WORLD_LOCAL_RANK=1 KYKLOS_COORDINATOR=a:3",
            ),
            "5/8 1/1 a:3",
        ),
        // The same in two words: what one does not say, the other does.
        ("", slurm("PMI_RANK=1 PMI_SIZE=2"), "1/2 0/1 a:29600"),
        ("", slurm("RANK=1 WORLD_SIZE=2 LOCAL_RANK=0"), "1/2 0/1 a:29600"),
        ("--rank 1 --world 2", slurm(""), "1/2 0/1 a:29600"),
        (
            "",
            "JOB_COMPLETION_INDEX=1 RANK=5 WORLD_SIZE=8 LOCAL_RANK=1 MASTER_ADDR=a MASTER_PORT=3".into(),
            "5/8 1/1 a:3",
        ),
        // Ranks started by hand from the shell of a task.
        (
            "--rank 1 --world 2 --coordinator h:1",
            "SLURM_PROCID=0 SLURM_NTASKS=1 SLURM_JOB_NODELIST=a".into(),
            "1/2 0/1 h:1",
        ),
    ] {
        assert_eq!(short(read(flags, &variables).unwrap()), expected, "{flags} | {variables}");
    }
}

#[test]
fn contradictions_and_halves_are_refused_with_both_words() {
    for (flags, variables, words) in [
        ("", "RANK=5", &["RANK is set", "WORLD_SIZE is not"][..]),
        ("", "WORLD_SIZE=5", &["WORLD_SIZE is set", "RANK is not"]),
        ("", "OMPI_COMM_WORLD_RANK=5", &["OMPI_COMM_WORLD_SIZE is not"]),
        ("", "PMI_SIZE=5", &["PMI_RANK is not"]),
        ("", "SLURM_PROCID=1", &["SLURM_PROCID=1", "SLURM_NTASKS"]),
        ("", "SLURM_PROCID=0 SLURM_STEP_ID=3", &["SLURM_NTASKS"]),
        ("", "JOB_COMPLETION_INDEX=1", &["JOB_COMPLETION_INDEX=1", "KYKLOS_WORLD"]),
        ("", "KYKLOS_WORLD=3", &["KYKLOS_WORLD=3", "--rank"]),
        ("", "KYKLOS_WORLD=0", &["KYKLOS_WORLD=0"]),
        ("--world 3", "", &["--world 3", "--rank"]),
        ("--coordinator a:1", "", &["--coordinator a:1", "--rank"]),
        ("--rank 0", "", &["--rank 0", "--world"]),
        ("", "RANK=5 WORLD_SIZE=5", &["RANK=5", "WORLD_SIZE=5"]),
        ("", "RANK=x WORLD_SIZE=5", &["RANK=x"]),
        ("", "RANK=-1 WORLD_SIZE=5", &["RANK=-1"]),
        ("", "RANK=99999999999 WORLD_SIZE=5", &["RANK=99999999999"]),
        ("", "RANK=0 WORLD_SIZE=2", &["RANK=0", "MASTER_ADDR"]),
        ("", "RANK=0 WORLD_SIZE=2 MASTER_ADDR=a", &["MASTER_ADDR=a", "MASTER_PORT"]),
        ("", "RANK=0 WORLD_SIZE=2 MASTER_ADDR=a MASTER_PORT=0", &["MASTER_PORT=0"]),
        ("", "RANK=0 WORLD_SIZE=2 MASTER_ADDR=a;b MASTER_PORT=1", &["MASTER_ADDR=a;b"]),
        ("", "RANK=0 WORLD_SIZE=2 PMI_RANK=1 PMI_SIZE=2", &["RANK=0", "PMI_RANK=1"]),
        ("", "SLURM_PROCID=0 SLURM_NTASKS=2 SLURM_JOB_NODELIST=n[", &["SLURM_JOB_NODELIST=n["]),
        (
            "",
            "SLURM_PROCID=0 SLURM_NTASKS=2 JOB_COMPLETION_INDEX=1",
            &["SLURM_PROCID=0", "JOB_COMPLETION_INDEX=1"],
        ),
        ("--rank 0 --world 4", "SLURM_PROCID=1 SLURM_NTASKS=4", &["--rank 0", "SLURM_PROCID=1"]),
        ("--world 4", "SLURM_PROCID=0 SLURM_NTASKS=1", &["--world 4", "SLURM_NTASKS=1"]),
        ("--world 4 --rank 1", "KYKLOS_WORLD=3", &["--world 4", "KYKLOS_WORLD=3"]),
        (
            "--coordinator a:1 --rank 1 --world 2",
            "KYKLOS_COORDINATOR=b:1",
            &["--coordinator a:1", "KYKLOS_COORDINATOR=b:1"],
        ),
        ("--rank 1 --world 2 --coordinator a", "", &["--coordinator a", "node1:29600"]),
        ("", "JOB_COMPLETION_INDEX=1 KYKLOS_WORLD=2 KYKLOS_SERVICE=s", &["HOSTNAME"]),
        ("", "JOB_COMPLETION_INDEX=1 KYKLOS_WORLD=2 KYKLOS_SERVICE=s HOSTNAME=ring-2", &["HOSTNAME=ring-2"]),
        ("", "JOB_COMPLETION_INDEX=1 KYKLOS_WORLD=2 KYKLOS_SERVICE=s/t HOSTNAME=ring-1", &["s/t"]),
        (
            "--rank 0 --world 2 --coordinator a:1",
            "KYKLOS_LAUNCH=1 RANK=0 WORLD_SIZE=2",
            &["--rank 0", "kyklos launch"],
        ),
    ] {
        let failure = read(flags, variables).expect_err(variables);
        assert_eq!(failure.exit, 2, "{flags} | {variables}: {}", failure.text);
        for word in words {
            assert!(failure.text.contains(word), "`{word}` is not in: {}", failure.text);
        }
    }
}

#[test]
fn a_cluster_file_joins_with_a_launcher_or_refuses_it() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("cluster.toml");
    std::fs::write(
        &path,
        "job = 'train'\nranks = [{ host = 'a' }, { host = 'b' }, { host = 'b', device = 'cpu' }]",
    )
    .unwrap();
    let file = format!("--cluster {}", path.display());
    let launched = read(&file, "SLURM_PROCID=2 SLURM_NTASKS=3").unwrap().unwrap();
    assert_eq!(launched.device, "cpu".parse().ok());
    assert_eq!(launched.job.as_deref(), Some("train"));
    assert_eq!(launched.places, ["a", "b", "b"].map(|host| Some(host.to_owned())));
    assert_eq!(short(Some(launched)), "2/3 1/2 a:29600");
    assert_eq!(short(read(&format!("{file} --rank 0"), "").unwrap()), "0/3 0/1 a:29600");
    for (flags, variables, word) in [
        ("", "", "--rank R"),
        ("--rank 3", "", "has 3 ranks"),
        ("", "SLURM_PROCID=0 SLURM_NTASKS=1", "SLURM_NTASKS=1"),
        ("", "RANK=0 WORLD_SIZE=2", "WORLD_SIZE=2"),
        ("--rank 0 --coordinator b:1", "", "--coordinator b:1"),
        ("--rank 0", "KYKLOS_JOB_ID=other", "KYKLOS_JOB_ID=other"),
    ] {
        let failure = read(&format!("{file} {flags}"), variables).unwrap_err();
        assert_eq!(failure.exit, 2);
        assert!(failure.text.contains(word), "{}", failure.text);
    }
}

#[test]
fn slurm_places_tasks_as_it_deals_them_or_not_at_all() {
    let places = |rest: &str| read("", &format!("{SLURM} SLURM_PROCID=1 {rest}")).unwrap().unwrap().places;
    let of = |hosts: &str| hosts.split(' ').map(|host| Some(host.to_owned())).collect::<Vec<_>>();
    assert_eq!(places(""), of("n1 n1 n1 n2 n2"));
    assert_eq!(places("SLURM_DISTRIBUTION=block:cyclic"), of("n1 n1 n1 n2 n2"));
    assert_eq!(places("SLURM_DISTRIBUTION=cyclic SLURMD_NODENAME=n2"), of("n1 n2 n1 n2 n1"));
    assert_eq!(places("SLURM_DISTRIBUTION=plane=2"), []);
    assert_eq!(places("SLURMD_NODENAME=n2"), []);
}

#[test]
fn runs_of_one_job_are_told_apart() {
    let run = |variables: &str| read("", variables).unwrap().unwrap().run;
    let first = run(&format!("{SLURM} SLURM_PROCID=0"));
    assert_eq!(first, run(&format!("{SLURM} SLURM_PROCID=1")));
    assert_ne!(first, run(&format!("{SLURM} SLURM_PROCID=0 SLURM_RESTART_COUNT=1")));
    let torch = "RANK=0 WORLD_SIZE=1 TORCHELASTIC_RUN_ID=x";
    assert_ne!(run(torch), run(&format!("{torch} TORCHELASTIC_RESTART_COUNT=1")));
    assert_eq!(run("RANK=0 WORLD_SIZE=1"), None);
}
