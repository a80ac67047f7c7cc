//! An indexed Job of Kubernetes: the index of the pod is the rank, and the pod of index 0 has a name in the Job's
//! headless service. How many pods there are, Kubernetes does not tell them: KYKLOS_WORLD or --world does.

use super::source::{DEFAULT_PORT, HostPort, Nearness, Said, Source};
use super::variables::Variables;
use crate::failure::{Failure, Result};

pub(crate) fn source(variables: &Variables<'_>) -> Result<Source> {
    let Some(rank) = variables.number::<u32>("JOB_COMPLETION_INDEX")? else {
        return Ok(Source::default());
    };
    Ok(Source {
        nearness: Nearness::Outer,
        coordinator: coordinator(variables, rank.value)?,
        host_appears_late: true,
        local_rank: Some(0),
        local_world: Some(1),
        rank: Some(rank),
        ..Source::default()
    })
}

/// `<job>-0.<service>`, with a port if the service is said with one: pods of an indexed Job are called after their Job and index.
fn coordinator(variables: &Variables<'_>, index: u32) -> Result<Option<Said<HostPort>>> {
    let Some(service) = variables.text("KYKLOS_SERVICE") else {
        return Ok(None);
    };
    let wrong = |what: String| {
        Failure::request(
            format!("{}, but {what}", service.words),
            "name the address of index 0 with KYKLOS_COORDINATOR=HOST:PORT",
        )
    };
    let pod = variables.text("HOSTNAME").ok_or_else(|| wrong("HOSTNAME is not set".into()))?;
    // The name of a pod may be followed by its domain.
    let name = pod.value.split('.').next().unwrap_or_default();
    let job = name
        .strip_suffix(&format!("-{index}"))
        .ok_or_else(|| wrong(format!("{} does not end with the index {index}", pod.words)))?;
    let text = match service.value.contains(':') {
        true => format!("{job}-0.{}", service.value),
        false => format!("{job}-0.{}:{DEFAULT_PORT}", service.value),
    };
    let address = HostPort::parse(&text, &format!("{} {}", pod.words, service.words))?;
    Ok(Some(Said::new(address, format!("{} {}", pod.words, service.words))))
}
