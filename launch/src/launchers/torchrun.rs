//! torchrun: RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT. `kyklos
//! launch` sets the same variables. The address is used without the rank too, because scripts
//! export it under other launchers.

use super::Launcher;
use crate::address::HostPort;
use crate::error::{Error, Result};
use crate::source::{Precedence, Setting, Source};
use crate::variables::Variables;

pub(crate) const LAUNCHER: Launcher = Launcher {
    name: "torchrun",
    variables: &[
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
        "TORCHELASTIC_",
    ],
    rank_variables: &["RANK", "WORLD_SIZE"],
    precedence: Precedence::Launcher,
    read,
};

fn read(variables: &Variables<'_>) -> Result<Source> {
    let mut source = Source { coordinator: coordinator(variables)?, ..Source::default() };
    if let Some([rank, size]) = variables.pair::<u32>(["RANK", "WORLD_SIZE"])? {
        source.local_rank = Some(variables.count("LOCAL_RANK")?.unwrap_or(rank.value));
        source.local_size = Some(variables.count("LOCAL_WORLD_SIZE")?.unwrap_or(1).max(1));
        source.run_id = variables.text("TORCHELASTIC_RUN_ID").map(|run| {
            let restarts =
                variables.text("TORCHELASTIC_RESTART_COUNT").map_or("0".into(), |setting| setting.value);
            format!("torchelastic {} {restarts}", run.value)
        });
        (source.rank, source.size) = (Some(rank), Some(size));
    }
    Ok(source)
}

fn coordinator(variables: &Variables<'_>) -> Result<Option<Setting<HostPort>>> {
    let (host, port) = match (variables.text("MASTER_ADDR"), variables.number::<u16>("MASTER_PORT")?) {
        (Some(host), Some(port)) => (host, port),
        (Some(host), None) => {
            return Err(Error::request(
                format!("{} is set and MASTER_PORT is not", host.origin),
                "set both: the host and the UDP port of rank 0",
            ));
        }
        // A port without a host is no address.
        (None, _) => return Ok(None),
    };
    let origin = format!("{} {}", host.origin, port.origin);
    match HostPort::new(&host.value, port.value).filter(|address| address.port != 0) {
        Some(address) => Ok(Some(Setting::new(address, origin))),
        None => Err(Error::request(
            format!("{origin} is not an address"),
            "name a host and a UDP port that all ranks can reach",
        )),
    }
}

#[cfg(test)]
mod tests {
    use crate::assignment::local_rank_in;
    use crate::test_support::{assign, brief};
    use crate::variables::Variables;

    #[test]
    fn torchruns_variables_give_rank_world_and_coordinator() {
        for (variables, expected) in [
            (
                "RANK=5 WORLD_SIZE=8 LOCAL_RANK=1 LOCAL_WORLD_SIZE=4 MASTER_ADDR=a MASTER_PORT=29500",
                "5/8 1/4 a:29500",
            ),
            ("RANK=0 WORLD_SIZE=1", "0/1 0/1"),
            ("LOCAL_RANK=3 MASTER_ADDR=a MASTER_PORT=1", "alone"),
            ("RANK= WORLD_SIZE=", "alone"),
        ] {
            assert_eq!(brief(assign("", variables).unwrap()), expected, "{variables}");
        }
    }

    #[test]
    fn each_process_of_a_host_knows_its_index_there() {
        let local = |table: &[(&str, &str)]| {
            let look_up =
                |name: &str| table.iter().find(|(key, _)| *key == name).map(|(_, value)| (*value).to_owned());
            local_rank_in(&Variables::from_lookup(&look_up))
        };
        assert_eq!(local(&[("RANK", "5"), ("WORLD_SIZE", "8"), ("LOCAL_RANK", "1")]), Some(1));
        assert_eq!(local(&[("OMPI_COMM_WORLD_LOCAL_RANK", "1")]), None);
        assert_eq!(local(&[("RANK", "x"), ("WORLD_SIZE", "8"), ("LOCAL_RANK", "1")]), None);
        assert_eq!(local(&[]), None);
    }

    #[test]
    fn a_restart_is_another_run() {
        let run_id = |variables: &str| assign("", variables).unwrap().unwrap().run_id;
        let first = "RANK=0 WORLD_SIZE=1 TORCHELASTIC_RUN_ID=x";
        assert_ne!(run_id(first), run_id(&format!("{first} TORCHELASTIC_RESTART_COUNT=1")));
        assert_eq!(run_id("RANK=0 WORLD_SIZE=1"), None);
    }

    #[test]
    fn incomplete_and_wrong_variables_are_refused_by_name() {
        for (variables, words) in [
            ("RANK=5", &["RANK is set", "WORLD_SIZE is not"][..]),
            ("WORLD_SIZE=5", &["WORLD_SIZE is set", "RANK is not"]),
            ("RANK=5 WORLD_SIZE=5", &["RANK=5", "WORLD_SIZE=5"]),
            ("RANK=x WORLD_SIZE=5", &["RANK=x"]),
            ("RANK=-1 WORLD_SIZE=5", &["RANK=-1"]),
            ("RANK=99999999999 WORLD_SIZE=5", &["RANK=99999999999"]),
            ("RANK=0 WORLD_SIZE=2", &["RANK=0", "MASTER_ADDR"]),
            ("RANK=0 WORLD_SIZE=2 MASTER_ADDR=a", &["MASTER_ADDR=a", "MASTER_PORT"]),
            ("RANK=0 WORLD_SIZE=2 MASTER_ADDR=a MASTER_PORT=0", &["MASTER_PORT=0"]),
            ("RANK=0 WORLD_SIZE=2 MASTER_ADDR=a;b MASTER_PORT=1", &["MASTER_ADDR=a;b"]),
        ] {
            let error = assign("", variables).expect_err(variables);
            let text = error.to_string();
            assert!(error.is_request() && words.iter().all(|word| text.contains(word)), "{text}");
        }
    }
}
