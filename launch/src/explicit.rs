//! Settings for this run: options, and Kyklos' own variables.

use crate::address::HostPort;
use crate::error::{Error, Result};
use crate::options::{Options, named};
use crate::source::{Precedence, Setting, Source};
use crate::variables::{COORDINATOR, JOB_ID, Variables, WORLD};

pub(crate) fn options(options: &Options) -> Result<Source> {
    Ok(Source {
        precedence: Precedence::Explicit,
        rank: options.rank.map(|rank| Setting::new(rank, named("rank", rank))),
        size: options.size.map(|size| Setting::new(size.get(), named("size", size))),
        coordinator: match &options.coordinator {
            Some(text) => {
                let origin = named("coordinator", text);
                Some(Setting::new(HostPort::parse(text, &origin)?, origin))
            }
            None => None,
        },
        job: options.job.as_ref().map(|job| Setting::new(job.clone(), named("job", job))),
        ..Source::default()
    })
}

pub(crate) fn variables(variables: &Variables<'_>) -> Result<Source> {
    let size = variables.number::<u32>(WORLD)?;
    if let Some(zero) = size.as_ref().filter(|size| size.value == 0) {
        return Err(Error::request(zero.origin.clone(), "a group has at least one rank"));
    }
    Ok(Source {
        precedence: Precedence::Explicit,
        size,
        coordinator: match variables.text(COORDINATOR) {
            Some(text) => Some(Setting::new(HostPort::parse(&text.value, &text.origin)?, text.origin)),
            None => None,
        },
        job: variables.text(JOB_ID),
        ..Source::default()
    })
}
