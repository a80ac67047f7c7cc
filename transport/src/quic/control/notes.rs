//! The notes of a round on a rank that is not the coordinator: they arrive in frames before the
//! verdict.

use bytes::Bytes;

use crate::wire::Notes;

/// The notes that have arrived for the next verdict.
#[derive(Debug)]
pub(crate) struct ArrivingNotes {
    size: usize,
    round: u64,
    notes: Vec<Bytes>,
}

impl ArrivingNotes {
    pub(crate) fn new(size: u32) -> Self {
        Self { size: size as usize, round: 0, notes: Vec::new() }
    }

    /// Adds the notes of the next ranks. Fails if they are not of the same round, or are more than
    /// there are ranks.
    pub(crate) fn add(&mut self, round: u64, notes: &Notes) -> Result<(), String> {
        self.check_round(round)?;
        let count = self.notes.len() + notes.len();
        if notes.is_empty() || count > self.size {
            return Err(format!("{count} notes in agreement {round} of {} ranks", self.size));
        }
        self.round = round;
        self.notes.extend(notes.iter());
        Ok(())
    }

    /// The notes of all ranks at the verdict of a round that ended well. Without notes before it,
    /// all are empty.
    pub(crate) fn take(&mut self, round: u64) -> Result<Vec<Bytes>, String> {
        self.check_round(round)?;
        match self.notes.len() {
            0 => Ok(vec![Bytes::new(); self.size]),
            count if count == self.size => Ok(std::mem::take(&mut self.notes)),
            count => Err(format!("{count} notes in agreement {round} of {} ranks", self.size)),
        }
    }

    /// At the verdict of a round that was refused, there are no notes.
    pub(crate) fn none(&self, round: u64) -> Result<(), String> {
        if self.notes.is_empty() {
            Ok(())
        } else {
            Err(format!("notes in agreement {round}, which was refused"))
        }
    }

    fn check_round(&self, round: u64) -> Result<(), String> {
        if self.notes.is_empty() || self.round == round {
            return Ok(());
        }
        Err(format!("agreement {round} follows notes of agreement {}", self.round))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn notes(texts: &[&'static str]) -> Vec<Bytes> {
        texts.iter().map(|text| Bytes::from_static(text.as_bytes())).collect()
    }

    fn frame(texts: &[&'static str]) -> Notes {
        Notes::split(&notes(texts)).remove(0)
    }

    #[test]
    fn notes_of_all_ranks_arrive_in_any_number_of_frames() {
        let mut arriving = ArrivingNotes::new(3);
        assert_eq!(arriving.take(0), Ok(notes(&["", "", ""])));
        for round in 1..3 {
            assert_eq!(arriving.add(round, &frame(&["a"])), Ok(()));
            assert_eq!(arriving.add(round, &frame(&["", "c"])), Ok(()));
            assert_eq!(arriving.take(round), Ok(notes(&["a", "", "c"])));
        }
        assert_eq!(arriving.none(3), Ok(()));
        assert_eq!(arriving.take(4), Ok(notes(&["", "", ""])));
    }

    #[test]
    fn a_wrong_number_of_notes_and_a_wrong_round_are_errors() {
        let mut arriving = ArrivingNotes::new(3);
        assert_eq!(arriving.add(7, &frame(&["a", "b"])), Ok(()));
        assert_eq!(arriving.take(7).unwrap_err(), "2 notes in agreement 7 of 3 ranks");
        assert_eq!(arriving.take(8).unwrap_err(), "agreement 8 follows notes of agreement 7");
        assert_eq!(arriving.add(6, &frame(&["c"])).unwrap_err(), "agreement 6 follows notes of agreement 7");
        assert_eq!(arriving.none(7).unwrap_err(), "notes in agreement 7, which was refused");
        assert_eq!(arriving.add(7, &frame(&["c", "d"])).unwrap_err(), "4 notes in agreement 7 of 3 ranks");
        // No memory for frames without a note.
        assert!(arriving.add(7, &Notes::default()).is_err());
    }
}
