//! The duties of every transport. Each claim is a function of a factory of groups.

mod again;
mod endings;
mod messages;
mod recorded;
mod votes;

use std::time::Duration;

use bytes::Bytes;
use kyklos_transport::{Abort, Group, Posted, Tag, TransportError, Vote};
use pollster::block_on;

pub(crate) use again::*;
pub(crate) use endings::*;
pub(crate) use messages::*;
pub(crate) use recorded::*;
pub(crate) use votes::*;

pub(crate) type Ranks = Vec<Group>;

/// No wait in a test lasts longer than this.
pub(crate) const LONG: Duration = Duration::from_secs(120);

/// An end that does not wait for a deadline comes within this time, also on a machine with much
/// other work.
pub(crate) const SOON: Duration = Duration::from_secs(60);

pub(crate) fn tag(op: u64, message: u32) -> Tag {
    Tag { op, message }
}

/// Bytes that differ by seed and position.
pub(crate) fn payload(bytes: usize, seed: u64) -> Bytes {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut out = Vec::with_capacity(bytes + 8);
    while out.len() < bytes {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        out.extend_from_slice(&state.to_le_bytes());
    }
    out.truncate(bytes);
    Bytes::from(out)
}

pub(crate) fn ready(byte: u8) -> Vote {
    Vote::ready([byte; 32])
}

/// Closes all ranks at the same time, as their programs do.
pub(crate) fn close(group: Ranks) {
    let closing: Vec<Posted<()>> = group.iter().map(|rank| rank.close(LONG)).collect();
    for (rank, closed) in closing.into_iter().enumerate() {
        block_on(closed).unwrap_or_else(|error| panic!("close of rank {rank}: {error}"));
    }
}

fn abort_of(error: TransportError) -> Abort {
    match error {
        TransportError::Aborted { abort, .. } => abort,
        other => panic!("not an abort: {other}"),
    }
}

/// Instantiates every claim for one factory.
macro_rules! conformance_tests {
    ($make:path: $($claim:ident)*) => {
        $(
            #[test]
            fn $claim() {
                $crate::conformance::$claim($make);
            }
        )*
    };
    ($make:path) => {
        conformance_tests! { $make:
            payloads_of_all_sizes_and_part_counts_arrive_unchanged
            both_sides_may_send_first
            bursts_from_everyone_to_everyone_arrive
            tags_are_matched_in_any_order
            a_send_waits_for_its_receive
            a_send_reports_how_long_it_waited_for_its_receive
            ranks_agree_when_all_are_ready_with_one_plan
            the_lowest_refusal_is_the_error_of_all_ranks_and_the_group_continues
            different_plans_are_noticed_by_everyone
            notes_of_all_ranks_arrive_whole_and_in_rank_order
            notes_of_the_longest_size_arrive_and_one_byte_more_is_refused_at_the_caller
            a_refusal_wins_over_notes
            different_plans_are_noticed_whatever_the_notes
            notes_of_consecutive_rounds_do_not_mix
            an_agreement_that_times_out_names_the_missing_voters
            a_rank_that_leaves_instead_of_voting_is_an_error
            an_abort_ends_everything_everywhere_and_names_one_culprit
            an_abort_of_a_third_rank_ends_messages_in_flight
            a_sender_that_is_dropped_ends_messages_in_flight
            a_dropped_rank_has_died
            a_deadline_ends_a_call_and_says_how_far_it_got
            a_deadline_that_a_rank_reports_as_an_abort_ends_the_group
            ranks_that_finish_early_may_leave
            close_waits_until_the_receiver_has_what_was_sent
            a_rank_that_leaves_while_it_is_needed_is_an_error
            a_rank_whose_close_timed_out_has_left
            parts_of_other_lengths_than_expected_are_a_broken_protocol
            invalid_calls_are_refused_and_harmless
            a_tag_is_used_once
            abandoned_messages_do_not_block_later_ones
            a_rank_records_what_it_did_and_what_an_abort_ended
            survivors_form_the_next_group_whichever_rank_died
            a_failed_group_forms_again_with_all_ranks
            too_few_survivors_form_no_group
            a_working_group_is_not_formed_again
        }
    };
}
