//! Kubernetes: a rank is a pod of an indexed Job, and its index is the rank. The pod of index 0 has
//! a name in the Job's headless service. Kubernetes does not tell pods how many there are:
//! `KYKLOS_WORLD` or an option does.

use super::Launcher;
use crate::address::{DEFAULT_PORT, HostPort};
use crate::error::{Error, Result};
use crate::source::{Precedence, Setting, Source};
use crate::variables::Variables;

pub(super) const LAUNCHER: Launcher = Launcher {
    name: "Kubernetes",
    variables: &["JOB_COMPLETION_INDEX", "KYKLOS_SERVICE", "HOSTNAME"],
    rank_variables: &["JOB_COMPLETION_INDEX"],
    precedence: Precedence::Scheduler,
    read,
};

fn read(variables: &Variables<'_>) -> Result<Source> {
    let Some(rank) = variables.number::<u32>("JOB_COMPLETION_INDEX")? else {
        return Ok(Source::default());
    };
    Ok(Source {
        coordinator: coordinator(variables, rank.value)?,
        local_rank: Some(0),
        local_size: Some(1),
        rank: Some(rank),
        ..Source::default()
    })
}

/// `<job>-0.<service>`, with the service's port if it has one: the name of a pod of an indexed Job
/// is its Job and its index.
fn coordinator(variables: &Variables<'_>, index: u32) -> Result<Option<Setting<HostPort>>> {
    let Some(service) = variables.text("KYKLOS_SERVICE") else {
        return Ok(None);
    };
    let wrong = |what: String| {
        Error::request(
            format!("{}, but {what}", service.origin),
            "name the address of index 0 with KYKLOS_COORDINATOR=HOST:PORT",
        )
    };
    let pod = variables.text("HOSTNAME").ok_or_else(|| wrong("HOSTNAME is not set".into()))?;
    // A domain may follow the name of the pod.
    let name = pod.value.split('.').next().unwrap_or_default();
    let job = name
        .strip_suffix(&format!("-{index}"))
        .ok_or_else(|| wrong(format!("{} does not end with the index {index}", pod.origin)))?;
    let text = match service.value.contains(':') {
        true => format!("{job}-0.{}", service.value),
        false => format!("{job}-0.{}:{DEFAULT_PORT}", service.value),
    };
    let address = HostPort::parse(&text, &format!("{} {}", pod.origin, service.origin))?;
    Ok(Some(Setting::new(address, format!("{} {}", pod.origin, service.origin))))
}

#[cfg(test)]
mod tests {
    use crate::test_support::{assign, brief};

    #[test]
    fn the_index_of_a_pod_is_its_rank() {
        for (options, variables, expected) in [
            (
                "",
                "JOB_COMPLETION_INDEX=2 KYKLOS_WORLD=4 HOSTNAME=ring-2 KYKLOS_SERVICE=ring.default",
                "2/4 0/1 ring-0.ring.default:29600",
            ),
            ("size=4", "JOB_COMPLETION_INDEX=0 KYKLOS_COORDINATOR=ring-0.ring:7", "0/4 0/1 ring-0.ring:7"),
        ] {
            assert_eq!(brief(assign(options, variables).unwrap()), expected, "{options} | {variables}");
        }
    }

    #[test]
    fn pods_without_a_world_or_a_coordinator_are_refused_by_their_variables() {
        for (variables, words) in [
            ("JOB_COMPLETION_INDEX=1", &["JOB_COMPLETION_INDEX=1", "KYKLOS_WORLD"][..]),
            ("JOB_COMPLETION_INDEX=1 KYKLOS_WORLD=2 KYKLOS_SERVICE=s", &["HOSTNAME"]),
            ("JOB_COMPLETION_INDEX=1 KYKLOS_WORLD=2 KYKLOS_SERVICE=s HOSTNAME=ring-2", &["HOSTNAME=ring-2"]),
            ("JOB_COMPLETION_INDEX=1 KYKLOS_WORLD=2 KYKLOS_SERVICE=s/t HOSTNAME=ring-1", &["s/t"]),
        ] {
            let error = assign("", variables).expect_err(variables);
            let text = error.to_string();
            assert!(error.is_request() && words.iter().all(|word| text.contains(word)), "{text}");
        }
    }
}
