//! All sources of settings together, by precedence.

use crate::error::Result;
use crate::launchers::LAUNCHERS;
use crate::options::Options;
use crate::source::{Precedence, Setting, Source};
use crate::variables::Variables;
use crate::{cluster_file, explicit};

/// The rank that options, environment and cluster file give this process, if any.
pub(crate) fn requested_rank(options: &Options, variables: &Variables<'_>) -> Result<Option<u32>> {
    let sources = without_enclosing(all_sources(options, variables)?);
    Ok(first(&sources, |source| source.rank.as_ref()).map(|rank| rank.value))
}

/// All sources; of two that provide the same setting the first one wins.
pub(crate) fn all_sources(options: &Options, variables: &Variables<'_>) -> Result<Vec<Source>> {
    let mut sources = vec![explicit::options(options)?, explicit::variables(variables)?];
    let environment: Vec<Source> =
        LAUNCHERS.iter().map(|launcher| launcher.source(variables)).collect::<Result<_>>()?;
    if let Some(path) = &options.cluster_file {
        let rank = sources.iter().chain(&environment).find_map(|source| source.rank.as_ref());
        let file = cluster_file::source(path, options, rank.map(|rank| rank.value))?;
        sources.push(file);
    }
    sources.extend(environment);
    Ok(sources)
}

/// Leaves out environments that count something other than ranks, because other sources are more
/// exact.
pub(crate) fn without_enclosing(sources: Vec<Source>) -> Vec<Source> {
    let explicit = |source: &Source| source.precedence == Precedence::Explicit;
    let explicit_rank = first(&sources, |s| s.rank.as_ref().filter(|_| explicit(s)));
    let explicit_size = first(&sources, |s| s.size.as_ref().filter(|_| explicit(s)));
    let explicit_several = explicit_rank.is_some() && explicit_size.is_some_and(|size| size.value > 1);
    let mut launchers = sources.iter().filter(|source| source.precedence == Precedence::Launcher);
    let by_launcher =
        launchers.find_map(|source| Some((source.rank.as_ref()?.value, source.size.as_ref()?.value)));
    let keep = |source: &Source| match source.precedence {
        Precedence::Explicit => true,
        // An interactive shell that is itself the only task. The user starts ranks in it by hand.
        _ if explicit_several && source.size.as_ref().is_some_and(|size| size.value == 1) => false,
        Precedence::Launcher => true,
        // A task that is itself a launcher: its number is not the rank.
        Precedence::Scheduler => by_launcher.is_none_or(|(rank, size)| {
            source.rank.as_ref().is_none_or(|set| set.value == rank)
                && source.size.as_ref().is_none_or(|set| set.value == size)
        }),
    };
    sources.iter().filter(|source| keep(source)).cloned().collect()
}

pub(crate) fn first<T>(
    sources: &[Source],
    pick: impl Fn(&Source) -> Option<&Setting<T>>,
) -> Option<&Setting<T>> {
    sources.iter().find_map(pick)
}
