use kyklos_transport::Rank;
use kyklos_transport::quic::{ClusterAuthority, JobId};

use crate::error::Error;
use crate::test_support::{assign, brief};

#[test]
fn options_and_own_variables_give_rank_world_and_coordinator() {
    for (options, variables, expected) in [
        ("", "", "alone"),
        ("", "KYKLOS_COORDINATOR=h:1", "alone"),
        ("rank=1 size=3 coordinator=a:7", "", "1/3 0/1 a:7"),
        ("rank=1", "KYKLOS_WORLD=3 KYKLOS_COORDINATOR=a:7", "1/3 0/1 a:7"),
    ] {
        assert_eq!(brief(assign(options, variables).unwrap()), expected, "{options} | {variables}");
    }
}

#[test]
fn a_launcher_wins_over_its_scheduler_and_equal_settings_are_no_contradiction() {
    let slurm =
        |rest: &str| format!("SLURM_PROCID=1 SLURM_NTASKS=2 SLURM_LOCALID=0 SLURM_JOB_NODELIST=a,b {rest}");
    for (options, variables, expected) in [
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
        // Two sources with equal values: each adds the settings that the other one lacks.
        ("", slurm("PMI_RANK=1 PMI_SIZE=2"), "1/2 0/1 a:29600"),
        ("", slurm("RANK=1 WORLD_SIZE=2 LOCAL_RANK=0"), "1/2 0/1 a:29600"),
        ("rank=1 size=2", slurm(""), "1/2 0/1 a:29600"),
        (
            "",
            "JOB_COMPLETION_INDEX=1 RANK=5 WORLD_SIZE=8 LOCAL_RANK=1 MASTER_ADDR=a MASTER_PORT=3".into(),
            "5/8 1/1 a:3",
        ),
        // Ranks started by hand from the shell of a task.
        (
            "rank=1 size=2 coordinator=h:1",
            "SLURM_PROCID=0 SLURM_NTASKS=1 SLURM_JOB_NODELIST=a".into(),
            "1/2 0/1 h:1",
        ),
    ] {
        assert_eq!(brief(assign(options, &variables).unwrap()), expected, "{options} | {variables}");
    }
}

#[test]
fn contradictory_and_incomplete_settings_are_refused_by_both_names() {
    for (options, variables, words) in [
        ("", "KYKLOS_WORLD=3", &["KYKLOS_WORLD=3", "option rank"][..]),
        ("", "KYKLOS_WORLD=0", &["KYKLOS_WORLD=0"]),
        ("size=3", "", &["option size=3", "option rank"]),
        ("coordinator=a:1", "", &["option coordinator=a:1", "option rank"]),
        ("rank=0", "", &["option rank=0", "option size"]),
        ("", "RANK=0 WORLD_SIZE=2 PMI_RANK=1 PMI_SIZE=2", &["RANK=0", "PMI_RANK=1"]),
        (
            "",
            "SLURM_PROCID=0 SLURM_NTASKS=2 JOB_COMPLETION_INDEX=1",
            &["SLURM_PROCID=0", "JOB_COMPLETION_INDEX=1"],
        ),
        ("rank=0 size=4", "SLURM_PROCID=1 SLURM_NTASKS=4", &["option rank=0", "SLURM_PROCID=1"]),
        ("size=4", "SLURM_PROCID=0 SLURM_NTASKS=1", &["option size=4", "SLURM_NTASKS=1"]),
        ("size=4 rank=1", "KYKLOS_WORLD=3", &["option size=4", "KYKLOS_WORLD=3"]),
        (
            "coordinator=a:1 rank=1 size=2",
            "KYKLOS_COORDINATOR=b:1",
            &["option coordinator=a:1", "KYKLOS_COORDINATOR=b:1"],
        ),
        ("rank=1 size=2 coordinator=a", "", &["option coordinator=a", "node1:29600"]),
        (
            "rank=0 size=2 coordinator=a:1",
            "KYKLOS_LAUNCH=1 RANK=0 WORLD_SIZE=2",
            &["rank=0", "kyklos launch"],
        ),
    ] {
        let error = assign(options, variables).expect_err(variables);
        let text = error.to_string();
        assert!(matches!(error, Error::Request { .. }), "{options} | {variables}: {text}");
        for word in words {
            assert!(text.contains(word), "`{word}` is not in: {text}");
        }
    }
}

#[test]
fn more_ranks_than_a_group_has_are_refused_before_they_take_memory() {
    for (options, variables) in [
        ("rank=0 size=2049 coordinator=a:1", ""),
        ("", "RANK=0 WORLD_SIZE=1000000000 MASTER_ADDR=a MASTER_PORT=3"),
        (
            "",
            "RANK=0 WORLD_SIZE=4294967295 LOCAL_RANK=0 LOCAL_WORLD_SIZE=4294967295 MASTER_ADDR=a MASTER_PORT=3",
        ),
        ("", "SLURM_STEP_ID=0 SLURM_PROCID=0 SLURM_STEP_NUM_TASKS=3000000000 SLURM_STEP_NODELIST=n[1-2]"),
    ] {
        let mut refused = None;
        let allocated = allocation_counter::measure(|| refused = assign(options, variables).err());
        let error = refused.expect("more ranks than a group has");
        assert!(
            error.is_request() && error.to_string().ends_with(": a group has at most 2048 ranks"),
            "{error}"
        );
        assert!(allocated.bytes_max < 1 << 20, "{} bytes", allocated.bytes_max);
    }
    let most = "rank=2047 size=2048 coordinator=a:1";
    assert_eq!(brief(assign(most, "").unwrap()), "2047/2048 0/1 a:1");
}

#[test]
fn a_cluster_file_completes_a_launcher_or_is_refused_with_it() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("cluster.toml");
    std::fs::write(
        &path,
        "job = 'train'\nranks = [{ host = 'a' }, { host = 'b' }, { host = 'b', device = 'cpu' }]",
    )
    .unwrap();
    let file = format!("cluster_file={}", path.display());
    let assignment = assign(&file, "SLURM_PROCID=2 SLURM_NTASKS=3").unwrap().unwrap();
    assert_eq!(assignment.device.as_deref(), Some("cpu"));
    assert_eq!(assignment.job.as_deref(), Some("train"));
    assert_eq!(assignment.hosts, ["a", "b", "b"].map(|host| Some(host.to_owned())));
    assert_eq!(brief(Some(assignment)), "2/3 1/2 a:29600");
    assert_eq!(brief(assign(&format!("{file} rank=0"), "").unwrap()), "0/3 0/1 a:29600");
    for (options, variables, word) in [
        ("", "", "option rank"),
        ("rank=3", "", "has 3 ranks"),
        ("", "SLURM_PROCID=0 SLURM_NTASKS=1", "SLURM_NTASKS=1"),
        ("", "RANK=0 WORLD_SIZE=2", "WORLD_SIZE=2"),
        ("rank=0 coordinator=b:1", "", "option coordinator=b:1"),
        ("rank=0", "KYKLOS_JOB_ID=other", "KYKLOS_JOB_ID=other"),
    ] {
        let error = assign(&format!("{file} {options}"), variables).unwrap_err();
        assert!(error.is_request() && error.to_string().contains(word), "{error}");
    }
}

#[test]
fn the_environment_can_turn_shared_memory_off_and_a_wrong_word_is_refused() {
    let alone = "RANK=1 WORLD_SIZE=2 MASTER_ADDR=a MASTER_PORT=3";
    let assigned = |word: &str| assign("", &format!("{alone} KYKLOS_SHARED_MEMORY={word}"));
    for (word, shares) in [("on", true), ("", true), ("off", false)] {
        assert_eq!(assigned(word).unwrap().unwrap().options.link.shared_memory, shares, "{word}");
    }
    let error = assigned("no").unwrap_err().to_string();
    assert!(error.contains("KYKLOS_SHARED_MEMORY=no: say on or off"), "{error}");
}

/// However the name was given: by an option, a variable, any launcher or a cluster file.
#[test]
fn a_name_of_rank_0_without_an_address_is_one_error_with_one_kind() {
    let folder = tempfile::tempdir().unwrap();
    let cluster = folder.path().join("cluster.toml");
    let ranks = "[[ranks]]\nhost = 'a'\n[[ranks]]\nhost = 'b'\n";
    std::fs::write(&cluster, format!("coordinator = '{NOWHERE}:29600'\n{ranks}")).unwrap();
    let identity = ClusterAuthority::new(JobId::random().unwrap()).unwrap().issue(Rank(1)).unwrap();
    for (options, variables, name) in [
        (format!("rank=1 size=2 coordinator={NOWHERE}:29600"), String::new(), NOWHERE),
        ("rank=1 size=2".to_owned(), format!("KYKLOS_COORDINATOR={NOWHERE}:29600"), NOWHERE),
        (format!("rank=1 cluster_file={}", cluster.display()), String::new(), NOWHERE),
        (String::new(), format!("RANK=1 WORLD_SIZE=2 MASTER_ADDR={NOWHERE} MASTER_PORT=29600"), NOWHERE),
        (
            String::new(),
            format!(
                "SLURM_JOB_ID=7 SLURM_STEP_ID=0 SLURM_PROCID=1 SLURM_STEP_NUM_TASKS=2 SLURM_STEP_NODELIST={NOWHERE} \
                 SLURM_LOCALID=1 SLURM_NODEID=0 SLURM_STEP_TASKS_PER_NODE=2"
            ),
            NOWHERE,
        ),
        (
            String::new(),
            format!("JOB_COMPLETION_INDEX=1 KYKLOS_WORLD=2 KYKLOS_SERVICE={NOWHERE} HOSTNAME=ring-1"),
            &format!("ring-0.{NOWHERE}"),
        ),
    ] {
        let case = format!("{options} | {variables}");
        let mut assignment = assign(&options, &variables).unwrap().unwrap();
        assignment.set_identity(identity.clone());
        // The name is looked up once.
        assignment.options.join_deadline = std::time::Duration::ZERO;
        let error = assignment.join().unwrap_err();
        assert!(matches!(error, Error::Transport(_)) && !error.is_refusal(), "{case}: {error:?}");
        let text = error.to_string();
        let begins = format!("rank 0 cannot be found at {name}: the name had no address for ");
        assert!(text.starts_with(&begins) && text.contains("name an address instead"), "{case}: {text}");
    }
}

/// No name, and no resolver is asked for it: a label has at most 63 bytes (RFC 1035, 2.3.4).
const NOWHERE: &str = "no-such-host-no-such-host-no-such-host-no-such-host-no-such-host.invalid";
