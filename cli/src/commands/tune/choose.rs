//! The choice among candidates: a pure function of their times and checks.

use crate::median::median;

/// The measurement of a candidate.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Outcome {
    /// Its result is within the tolerance; the times of its rounds, in milliseconds. Round i of one
    /// candidate ran next to round i of the others.
    Right(Vec<f64>),
    /// Its result is outside the tolerance: how.
    Wrong(String),
    /// It did not run, or was not timed to the end: why.
    Left(String),
}

/// The choice, and the reason for each candidate.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Choice {
    /// Index of the winner; none where nothing could be compared.
    pub(crate) winner: Option<usize>,
    /// For each candidate.
    pub(crate) why: Vec<String>,
}

/// Chooses among `candidates`, the built-in one first.
///
/// A candidate replaces the built-in choice only if its median is better by [`MARGIN`] and it was
/// faster in three of four rounds: one slow period of a noisy machine must not decide. If the
/// built-in choice is wrong or cannot run, the fastest right candidate wins.
pub(crate) fn choose(candidates: &[Outcome]) -> Choice {
    let timed = |index: usize| match candidates.get(index) {
        Some(Outcome::Right(rounds)) if rounds.len() >= FEWEST_ROUNDS => {
            Some((median(rounds.iter().copied()), rounds))
        }
        _ => None,
    };
    let built_in = timed(0);
    let beats = |index: usize| {
        let (Some((_, rounds)), true) = (timed(index), index > 0) else { return false };
        match (built_in, &candidates[0]) {
            (Some((_, others)), _) => !within_margin(candidates, rounds) && often_faster(rounds, others),
            // A built-in choice that was not timed stays; a wrong one does not.
            (None, Outcome::Right(_)) => false,
            (None, _) => true,
        }
    };
    let winner = (0..candidates.len())
        .filter(|index| beats(*index))
        .min_by(|a, b| {
            let of = |index: usize| timed(index).map_or(f64::INFINITY, |(median, _)| median);
            of(*a).total_cmp(&of(*b))
        })
        .or(built_in.map(|_| 0));
    let why = (0..candidates.len()).map(|index| why(candidates, index, winner, beats(index))).collect();
    Choice { winner, why }
}

fn why(candidates: &[Outcome], index: usize, winner: Option<usize>, beats: bool) -> String {
    let rounds = match &candidates[index] {
        Outcome::Wrong(how) => return format!("WRONG, cannot win: {how}"),
        Outcome::Left(why) => return why.clone(),
        Outcome::Right(rounds) if rounds.len() < FEWEST_ROUNDS => {
            return format!("{} rounds are too few to judge", rounds.len());
        }
        Outcome::Right(rounds) => rounds,
    };
    let name = if index == 0 { "built-in" } else { "" };
    let faster_percent = match (&candidates[0], index) {
        (_, 0) | (Outcome::Wrong(_) | Outcome::Left(_), _) => None,
        (Outcome::Right(others), _) if others.len() < FEWEST_ROUNDS => None,
        (Outcome::Right(others), _) => {
            Some(100.0 * (1.0 - median(rounds.iter().copied()) / median(others.iter().copied())))
        }
    };
    let relative = match faster_percent {
        None => String::new(),
        Some(percent) if percent >= 0.0 => format!("{percent:.1} % faster"),
        Some(percent) => format!("{:.1} % slower", -percent),
    };
    let verdict = match (winner == Some(index), beats) {
        (true, _) => "winner",
        (false, true) => "not the fastest",
        (false, false) if faster_percent.is_none_or(|percent| percent < 0.0) => "",
        (false, false) if within_margin(candidates, rounds) => "within the margin",
        (false, false) => "in too few rounds",
    };
    [name, &relative, verdict].into_iter().filter(|part| !part.is_empty()).collect::<Vec<_>>().join(", ")
}

/// Whether these rounds are less than [`MARGIN`] better than those of the built-in choice.
fn within_margin(candidates: &[Outcome], rounds: &[f64]) -> bool {
    matches!(&candidates[0], Outcome::Right(others) if median(rounds.iter().copied()) > median(others.iter().copied()) * (1.0 - MARGIN))
}

/// Whether at least three of four rounds were faster than the rounds next to them.
fn often_faster(rounds: &[f64], others: &[f64]) -> bool {
    let pairs = rounds.len().min(others.len());
    let faster = rounds.iter().zip(others).filter(|(own, other)| own < other).count();
    4 * faster >= 3 * pairs
}

/// Required advantage over the built-in choice: two runs of one kernel differ by this much on a
/// quiet machine.
pub(crate) const MARGIN: f64 = 0.03;
/// Fewest rounds for a decision.
pub(crate) const FEWEST_ROUNDS: usize = 4;

#[cfg(test)]
mod tests {
    use super::*;

    fn right(times: [f64; 4]) -> Outcome {
        Outcome::Right(times.to_vec())
    }

    #[test]
    fn the_fastest_right_candidate_wins_if_it_is_clearly_faster() {
        let slow = right([10.0, 10.1, 9.9, 10.0]);
        let fast = right([8.0, 8.1, 7.9, 8.0]);
        let faster = right([7.0, 7.1, 6.9, 7.0]);
        let choice = choose(&[slow.clone(), fast, faster]);
        assert_eq!(choice.winner, Some(2));
        assert_eq!(choice.why, ["built-in", "20.0 % faster, not the fastest", "30.0 % faster, winner"]);

        let hardly = right([9.8, 9.9, 9.7, 9.8]);
        let choice = choose(&[slow, hardly]);
        assert_eq!(choice.winner, Some(0));
        assert_eq!(choice.why, ["built-in, winner", "2.0 % faster, within the margin"]);
    }

    #[test]
    fn a_slow_period_of_the_built_in_choice_decides_nothing() {
        // Faster by the medians, but in two of four rounds only.
        let built_in = right([5.0, 20.0, 20.0, 5.0]);
        let steady = right([10.0, 10.0, 10.0, 10.0]);
        let choice = choose(&[built_in, steady]);
        assert_eq!(choice.winner, Some(0));
        assert_eq!(choice.why[1], "20.0 % faster, in too few rounds");
    }

    #[test]
    fn a_wrong_candidate_never_wins_however_fast_it_is() {
        let wrong = Outcome::Wrong("o[0] is 0.3, should be 0.1".to_owned());
        let slow = right([10.0; 4]);
        let choice = choose(&[slow.clone(), wrong.clone()]);
        assert_eq!(choice.winner, Some(0));
        assert!(choice.why[1].starts_with("WRONG, cannot win: o[0]"), "{:?}", choice.why);
        // Not even where there is nothing else.
        assert_eq!(choose(&[wrong.clone(), wrong.clone()]).winner, None);
        assert_eq!(choose(&[]).winner, None);
        // The built-in choice has no privilege to be wrong.
        assert_eq!(choose(&[wrong, slow]).winner, Some(1));
    }

    #[test]
    fn too_few_rounds_decide_nothing() {
        let fast = Outcome::Right(vec![1.0; FEWEST_ROUNDS - 1]);
        let slow = right([10.0; 4]);
        assert_eq!(choose(&[slow.clone(), fast.clone()]).winner, Some(0));
        assert_eq!(choose(&[fast, slow]).winner, None);
        let left = Outcome::Left("its first run took 9 times as long".to_owned());
        assert_eq!(choose(&[left, right([10.0; 4])]).winner, Some(1));
    }
}
