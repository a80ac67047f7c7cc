//! Groups of processes that are not started by `kyklos launch`. They use the variables of other
//! launchers, flags or a file, with identities of `kyklos certs`.

use std::net::{Ipv4Addr, UdpSocket};
use std::path::PathBuf;
use std::process::{Child, Output, Stdio};
use std::time::{Duration, Instant, SystemTime};

use kyklos_transport::Rank;
use kyklos_transport::quic::{ClusterAuthority, Subject, Validity};

use crate::free_address::free_address;
use crate::support::*;

pub(crate) const ATTEND: &str = "attend --shape 1,256,4,2,64 --mask causal --device cpu --verify --json";

/// A folder with an authority and identities, and a port.
pub(crate) struct Cluster {
    folder: tempfile::TempDir,
    port: u16,
}

impl Cluster {
    pub(crate) fn new() -> Self {
        Self::at(free_address().port())
    }

    fn at(port: u16) -> Self {
        let cluster = Self { folder: tempfile::tempdir().unwrap(), port };
        cluster.certs("init");
        cluster
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    pub(crate) fn certs(&self, arguments: &str) {
        let mut command = command(&["certs"]);
        let output =
            command.args(arguments.split_whitespace()).current_dir(self.folder.path()).output().unwrap();
        succeeds(&output);
    }

    /// Runs ranks 0 to 2 with flags and variables. `{rank}`, `{port}`, `{dir}` and `{carrier}` in
    /// them are placeholders.
    fn run(&self, flags: &str, variables: &str) -> Vec<Output> {
        self.run_command(&format!("{ATTEND} {flags}"), variables)
    }

    /// The same with a whole command line.
    pub(crate) fn run_command(&self, arguments: &str, variables: &str) -> Vec<Output> {
        let started = Instant::now();
        let children: Vec<_> = (0..3).map(|rank| self.start(rank, arguments, variables)).collect();
        let limit = Duration::from_secs(180);
        let outputs = children.into_iter().map(|child| finish(child, limit)).collect();
        eprintln!("{:?}", started.elapsed());
        outputs
    }

    /// Starts one rank with a whole command line.
    pub(crate) fn start(&self, rank: u32, arguments: &str, variables: &str) -> Child {
        let fill = |text: &str| {
            text.replace("{rank}", &rank.to_string())
                .replace("{carrier}", if rank == 0 { "udp" } else { "tcp" })
                .replace("{port}", &self.port.to_string())
                .replace("{dir}", self.folder.path().to_str().unwrap())
        };
        let arguments = fill(arguments);
        let mut command = command(&arguments.split_whitespace().collect::<Vec<_>>());
        for pair in fill(variables).split_whitespace() {
            let (name, value) = pair.split_once('=').unwrap();
            command.env(name, value);
        }
        command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    }

    /// Checks that the three ranks compute one result. Each rank prints on standard error the
    /// source of its rank, and its network.
    #[track_caller]
    fn works(&self, flags: &str, variables: &str, words: &[&str]) {
        let outputs = self.run(flags, variables);
        for (rank, output) in outputs.iter().enumerate() {
            succeeds(output);
            let text = stderr(output);
            let Some((line, network)) = text.trim_end().split_once('\n') else { panic!("{text}") };
            for part in [&format!("rank {rank}: 127.0.0.1:"), "packets of", "MiB in all", "offered first"] {
                assert!(network.contains(part) && !network.contains('\n'), "`{part}` is not in: {network}");
            }
            assert!(line.starts_with(&format!("rank {rank} of 3 (")), "{line}");
            for word in words {
                assert!(line.contains(word), "`{word}` is not in: {line}");
            }
        }
        let json = json(&outputs[0]);
        assert_eq!(json["ranks"], 3);
        assert!(json["max_abs_error"].as_f64().unwrap() <= json["tolerance"].as_f64().unwrap());
    }

    /// Checks that all three ranks end within seconds, with an error that contains the words.
    #[track_caller]
    fn fails(&self, flags: &str, variables: &str, words: &[&str]) {
        let started = Instant::now();
        let outputs = self.run(&format!("--join-deadline 10 {flags}"), variables);
        assert!(started.elapsed() < Duration::from_secs(150), "{:?}", started.elapsed());
        for (rank, output) in outputs.iter().enumerate() {
            let text = stderr(output);
            assert!(!output.status.success(), "rank {rank} ended well: {text}");
            for word in words {
                assert!(text.contains(word), "rank {rank}: `{word}` is not in: {text}");
            }
        }
    }
}

pub(crate) const BY_FLAGS: &str =
    "--rank {rank} --world 3 --coordinator 127.0.0.1:{port} --identity {dir}/rank-{rank}.pem";

#[test]
fn by_flags() {
    let cluster = Cluster::new();
    cluster.certs("issue -n 3 --job train");
    cluster.works(BY_FLAGS, "", &["option size=3", "option coordinator=127.0.0.1", "of job train, until"]);
    // The environment may repeat the values of the flags. An identity that expires soon causes a
    // warning.
    let outputs =
        cluster.run(&format!("{BY_FLAGS} --warn-days 60"), "RANK={rank} WORLD_SIZE=3 KYKLOS_JOB_ID=train");
    assert!(stderr(&outputs[1]).contains("warning: the identity"), "{}", stderr(&outputs[1]));
    succeeds(&outputs[0]);
}

#[test]
fn a_revoked_identity_is_kept_out_by_a_line_of_what_was_issued() {
    let cluster = Cluster::new();
    cluster.certs("issue -n 3 --job train");
    let issued = std::fs::read_to_string(cluster.path("authority/issued")).unwrap();
    std::fs::write(cluster.path("revoked"), "# nobody yet\n").unwrap();
    let flags = format!("{BY_FLAGS} --revoked {{dir}}/revoked");
    cluster.works(&flags, "", &["of job train, until"]);
    let lost = issued.lines().find(|line| line.contains("rank 1 of job train")).unwrap();
    std::fs::write(cluster.path("revoked"), format!("# a lost laptop\n{lost}\n")).unwrap();
    cluster.fails(&flags, "", &["rank 1", "revoked"]);
    std::fs::write(cluster.path("revoked"), "rank 1\n").unwrap();
    cluster.fails(&flags, "", &["list of revoked keys", "line 1, begins with \"rank\""]);
}

#[test]
fn over_tcp_where_udp_does_not_get_through() {
    let cluster = Cluster::new();
    cluster.certs("issue -n 3 --job train");
    cluster.works(&format!("{BY_FLAGS} --network tcp"), "", &["option size=3"]);
    // Rank 0 refuses the other ranks, because they use another network. They say so at once, and at
    // their deadline.
    let outputs = cluster.run(&format!("{BY_FLAGS} --join-deadline 20 --network {{carrier}}"), "");
    for rank in [1, 2] {
        let text = stderr(&outputs[rank]);
        assert_eq!(text.matches("with the refusal of a rank 0 that uses UDP").count(), 2, "{text}");
    }
}

#[test]
fn over_several_lanes() {
    let cluster = Cluster::new();
    cluster.certs("issue -n 3 --job train");
    let flags = format!("{BY_FLAGS} --lanes 2");
    cluster.works(&flags, "", &[]);
    for output in cluster.run(&flags, "") {
        let text = stderr(&output);
        assert!(
            text.contains(" and ports ") && text.contains("for each of 2 lanes to each of 2 ranks"),
            "{text}"
        );
    }
}

#[test]
fn by_torchruns_names() {
    let cluster = Cluster::new();
    cluster.certs("issue -n 3");
    let variables = "RANK={rank} WORLD_SIZE=3 LOCAL_RANK={rank} LOCAL_WORLD_SIZE=3 MASTER_ADDR=localhost \
        MASTER_PORT={port} TORCHELASTIC_RUN_ID=x KYKLOS_IDENTITY={dir}/rank-{rank}.pem";
    cluster.works("", variables, &["WORLD_SIZE=3", "MASTER_ADDR=localhost"]);
}

/// One task on each of three hosts, each with the identity of its host.
#[test]
fn by_slurms_names_and_hosts() {
    let port = (29_600..30_600).find(|port| UdpSocket::bind((Ipv4Addr::LOCALHOST, *port)).is_ok()).unwrap();
    let cluster = Cluster::at(port);
    for host in 0..3 {
        cluster.certs(&format!("issue --host n{host}.localhost"));
    }
    let variables = format!(
        "SLURM_PROCID={{rank}} SLURM_NTASKS=3 SLURM_STEP_NUM_TASKS=3 SLURM_STEP_ID=0 SLURM_LOCALID=0 \
         SLURM_NODEID={{rank}} SLURM_STEP_NODELIST=n[0-2].localhost SLURM_STEP_TASKS_PER_NODE=1(x3) \
         SLURM_JOB_ID={} SLURMD_NODENAME=n{{rank}}.localhost KYKLOS_IDENTITY={{dir}}/host-{{host}}.pem",
        port - 29_600
    );
    cluster.works(
        "",
        &variables,
        &["SLURM_STEP_NUM_TASKS=3", "first of SLURM_STEP_NODELIST=n[0-2].localhost", "host n"],
    );
    // Every rank uses the identity of the same host. Ranks on other hosts are refused.
    let stolen = variables.replace("{host}", "n0.localhost");
    cluster.fails("", &stolen, &["has its place on host n", "certificate of host n0.localhost"]);
}

#[test]
fn by_the_index_of_a_pod() {
    let cluster = Cluster::new();
    cluster.certs("issue -n 3");
    let variables = "JOB_COMPLETION_INDEX={rank} KYKLOS_WORLD=3 HOSTNAME=ring-{rank} \
        KYKLOS_SERVICE=ring.localhost:{port} KYKLOS_IDENTITY={dir}/rank-{rank}.pem";
    cluster.works("", variables, &["JOB_COMPLETION_INDEX=", "rank 0 at ring-0.ring.localhost"]);
}

#[test]
fn by_mpis_names() {
    let cluster = Cluster::new();
    cluster.certs("issue --host node,127.0.0.1");
    let rest = "KYKLOS_COORDINATOR=127.0.0.1:{port} KYKLOS_IDENTITY={dir}/host-node.pem";
    let open_mpi = "OMPI_COMM_WORLD_RANK={rank} OMPI_COMM_WORLD_SIZE=3 OMPI_COMM_WORLD_LOCAL_RANK={rank}";
    cluster.works("", &format!("{open_mpi} {rest}"), &["OMPI_COMM_WORLD_SIZE=3", "host node,127.0.0.1"]);
    cluster.works("", &format!("PMI_RANK={{rank}} PMI_SIZE=3 {rest}"), &["PMI_SIZE=3"]);
}

#[test]
fn by_a_cluster_file() {
    let cluster = Cluster::new();
    cluster.certs("issue --host a.localhost --host b.localhost --job train");
    std::fs::copy(cluster.path("host-a.localhost.pem"), cluster.path("0.pem")).unwrap();
    for rank in [1, 2] {
        std::fs::copy(cluster.path("host-b.localhost.pem"), cluster.path(&format!("{rank}.pem"))).unwrap();
    }
    let file = format!(
        "job = 'train'\ncoordinator = 'a.localhost:{}'\n[[ranks]]\nhost = 'a.localhost'\n[[ranks]]\nhost = 'b.localhost'\n\
         [[ranks]]\nhost = 'b.localhost'\ndevice = 'cpu'",
        cluster.port
    );
    std::fs::write(cluster.path("cluster.toml"), &file).unwrap();
    let flags = "--cluster {dir}/cluster.toml --rank {rank} --identity {dir}/{rank}.pem";
    cluster.works(flags, "", &["has 3 ranks", "rank 0 at a.localhost", "of job train"]);
    // The file names another job than the identities.
    std::fs::write(cluster.path("cluster.toml"), file.replace("train", "other")).unwrap();
    cluster.fails(flags, "", &["job train"]);
}

const REFUSED: &[&str] = &["it refuses the certificate of this rank; its own error says why"];

#[test]
fn another_authority_another_job_another_rank_and_an_old_identity_are_named() {
    let cluster = Cluster::new();
    cluster.certs("issue -n 3 --job train");
    cluster.certs("init --authority other");
    let one = cluster.path("rank-1.pem");
    let good = std::fs::read(&one).unwrap();
    let instead = |arguments: &str, name: &str| {
        std::fs::remove_file(&one).unwrap();
        cluster.certs(&format!("issue --output tmp {arguments}"));
        std::fs::rename(cluster.path("tmp").join(name), &one).unwrap();
    };
    // Rank 1 refuses rank 0 before it has shown its own identity, so the others do not repeat its
    // words.
    let only_rank_1_says = |words: &[&str]| {
        let outputs = cluster.run(&format!("{BY_FLAGS} --join-deadline 10"), "");
        for (output, words) in outputs.iter().zip([REFUSED, words, REFUSED]) {
            let text = stderr(output);
            assert!(!output.status.success() && words.iter().all(|word| text.contains(word)), "{text}");
        }
    };
    instead("--ranks 1 --job train --authority other", "rank-1.pem");
    only_rank_1_says(&["another authority", "--also-trust"]);
    instead("--ranks 1 --job serve", "rank-1.pem");
    only_rank_1_says(&["of job serve"]);
    instead("--ranks 2 --job train", "rank-2.pem");
    cluster.fails(BY_FLAGS, "", &["rank 1 has the certificate of rank 2"]);

    let authority = ClusterAuthority::read(&cluster.path("authority"), "train").unwrap();
    let hour = Duration::from_secs(3600);
    let now = SystemTime::now();
    for (validity, word) in [
        (Validity { from: now - 3 * hour, until: now - hour }, "expired on 20"),
        (Validity { from: now + hour, until: now + 3 * hour }, "is not valid before 20"),
    ] {
        std::fs::remove_file(&one).unwrap();
        authority.issue_to(&Subject::Rank(Rank(1)), validity).unwrap().write_file(&one).unwrap();
        cluster.fails(BY_FLAGS, "", &["the certificate of rank 1 of job train", word]);
    }
    std::fs::write(&one, good).unwrap();
    cluster.works(BY_FLAGS, "", &[]);
}

#[test]
fn a_group_goes_from_one_authority_to_another() {
    let cluster = Cluster::new();
    cluster.certs("init --authority new");
    cluster.certs("issue -n 1 --also-trust new/authority.pem");
    cluster.certs("issue --ranks 1 --authority new --also-trust authority/authority.pem");
    cluster.certs("issue --ranks 2 --also-trust new/authority.pem");
    cluster.works(BY_FLAGS, "", &[]);
}

#[test]
fn ranks_of_one_process_come_before_any_launcher() {
    for variables in
        ["SLURM_PROCID=0 SLURM_NTASKS=4 SLURM_JOB_NODELIST=n[", "JOB_COMPLETION_INDEX=1", "PMI_RANK=3"]
    {
        let mut command = command(&[&ATTEND.split(' ').collect::<Vec<_>>()[..], &["--ranks", "2"]].concat());
        command.envs(variables.split(' ').map(|pair| pair.split_once('=').unwrap()));
        let output = command.output().unwrap();
        assert_eq!(json(&output)["ranks"], 2);
        assert!(stderr(&output).starts_with("warning: --ranks "), "{}", stderr(&output));
    }
}
