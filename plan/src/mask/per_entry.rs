//! One mask for each batch entry, such as packed sequences with other documents in each entry.

use super::Mask;
use super::padding::KeyPadding;
use crate::error::{Error, Result};

impl Mask {
    /// One mask for each batch entry: entry `b` has mask `masks[b]`, of any kind. One mask alone
    /// serves all entries.
    ///
    /// Every rank has all of these masks, as it has a mask that serves all entries.
    ///
    /// ```
    /// use kyklos_plan::{AttentionProblem, Dtype, Mask};
    ///
    /// // Packed sequences: documents of 5 and 3 tokens in the first entry; of 4 tokens each, and causal, in the second.
    /// let packed = Mask::per_entry(vec![
    ///     Mask::documents(vec![0, 5, 8])?,
    ///     Mask::documents(vec![0, 4, 8])?.and(Mask::causal())?,
    /// ])?;
    /// let keys = |entry| packed.visible(entry, 4, 8).keys();
    /// assert_eq!([keys(0), keys(1)], [5, 1]);
    /// // In the notation of the command line:
    /// assert_eq!(packed, "documents:0,5,8//causal+documents:0,4,8".parse()?);
    /// // The problem must have as many batch entries.
    /// assert!(AttentionProblem::new([2, 8, 4, 4, 64], Dtype::F16, packed.clone()).is_ok());
    /// assert!(AttentionProblem::new([3, 8, 4, 4, 64], Dtype::F16, packed).is_err());
    /// # Ok::<(), kyklos_plan::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Request`] for an empty list, and for a mask in it that itself has something for
    /// each batch entry.
    pub fn per_entry(mut masks: Vec<Self>) -> Result<Self> {
        if masks.len() == 1
            && let Some(mask) = masks.pop()
        {
            return Ok(mask);
        }
        if masks.is_empty() {
            return Err(Error::request(
                "a list of masks for each batch entry, without a mask",
                "give one mask, or one for each batch entry",
            ));
        }
        match masks.iter().enumerate().find_map(|(entry, mask)| Some((entry, mask.entry_count()?))) {
            Some((entry, count)) => Err(Error::request(
                format!("the mask of batch entry {entry} is itself for {count} batch entries"),
                "give each batch entry one mask, with one number of valid keys at most",
            )),
            None => Ok(Self { entries: masks, ..Self::default() }),
        }
    }

    /// The mask whose terms hold for batch entry `batch`.
    pub(super) fn of_entry(&self, batch: usize) -> &Self {
        if self.entries.is_empty() { self } else { &self.entries[batch] }
    }

    /// The intersection with `other`, for each batch entry by itself.
    pub(super) fn and_by_entry(&self, other: &Self) -> Result<Self> {
        let counts = [self.entry_count(), other.entry_count()];
        if let [Some(mine), Some(theirs)] = counts
            && mine != theirs
        {
            return Err(Error::request(
                format!("one mask is for {mine} batch entries, the other for {theirs}"),
                "give both masks the same number of batch entries, or one mask for all entries",
            ));
        }
        let count = counts.into_iter().flatten().next().unwrap_or(1);
        Self::per_entry(
            (0..count).map(|entry| self.alone(entry).and(other.alone(entry))).collect::<Result<_>>()?,
        )
    }

    /// Refuses a list that is not as long as the batch, and masks in it that do not fit `kv_len`
    /// keys.
    pub(super) fn entries_fit(&self, batch: u32, kv_len: u32) -> Result<()> {
        if self.entries.is_empty() {
            return Ok(());
        }
        if self.entries.len() != batch as usize {
            return Err(Error::request(
                format!("{} masks for batch entries, the batch has {batch} entries", self.entries.len()),
                "give one mask for all entries, or one for each",
            ));
        }
        self.entries.iter().enumerate().try_for_each(|(entry, mask)| {
            mask.fits(1, kv_len).map_err(|error| match error {
                Error::Request { mismatch, remedy } => {
                    Error::Request { mismatch: format!("batch entry {entry}: {mismatch}"), remedy }
                }
                error => error,
            })
        })
    }

    /// The number of batch entries that it has a mask or a number of valid keys for; none if it
    /// serves any number of entries.
    fn entry_count(&self) -> Option<usize> {
        Some(self.batch_classes()).filter(|count| *count > 1)
    }

    /// The mask of batch entry `entry`, as one that serves any number of entries.
    fn alone(&self, entry: usize) -> Self {
        let mask = self.of_entry(entry);
        let valid = match &mask.padding.valid[..] {
            [] => Vec::new(),
            [one] => vec![*one],
            many => vec![many[entry]],
        };
        Self { padding: KeyPadding { valid }, ..mask.clone() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::spans::Spans;

    const MASKS: [&str; 4] =
        ["documents:0,8,24", "causal", "window:6,-1+slices:0..9x2..5,3..24x7..11/causal", "valid:9"];

    fn parsed(text: &str) -> Mask {
        text.parse().unwrap()
    }

    fn seen(mask: &Mask, entry: usize) -> Vec<Spans> {
        (0..30).map(|q| mask.visible(entry, q, 24)).collect()
    }

    #[test]
    fn each_entry_sees_what_its_own_mask_shows() {
        let all = Mask::per_entry(MASKS.map(parsed).to_vec()).unwrap();
        assert_eq!((all.batch_classes(), all.is_full()), (4, false));
        assert_eq!(all.to_string(), MASKS.join("//"));
        for (entry, mask) in MASKS.map(parsed).iter().enumerate() {
            assert_eq!(seen(&all, entry), seen(mask, 0), "{mask}");
            assert_eq!(all.grows_along_queries(entry), mask.grows_along_queries(0), "{mask}");
            for (first, last) in [(0, 23), (3, 9), (11, 11)] {
                assert_eq!(all.hull(entry, first, last, 24), mask.hull(0, first, last, 24), "{mask}");
            }
        }
        all.fits(4, 24).unwrap();
    }

    #[test]
    fn intersections_are_those_of_the_entries() {
        let all = Mask::per_entry(MASKS.map(parsed).to_vec()).unwrap();
        for other in
            ["window:9,2", "valid:7,24,3,20", "valid:11", "full", "causal//full//valid:3//documents:0,5,24"]
        {
            let other = parsed(other);
            let both = all.clone().and(other.clone()).unwrap();
            // An intersection has one form, whatever the order.
            assert_eq!(both, other.clone().and(all.clone()).unwrap());
            assert_eq!(both, parsed(&both.to_string()));
            for entry in 0..4 {
                for q in 0..30 {
                    let [both, one, two] = [&both, &all, &other].map(|mask| mask.visible(entry, q, 24));
                    for key in 0..24 {
                        assert_eq!(
                            both.sees(key),
                            one.sees(key) && two.sees(key),
                            "{other} {entry} {q} {key}"
                        );
                    }
                }
            }
        }
        for other in ["causal//full", "valid:1,2"] {
            let error = all.clone().and(parsed(other)).unwrap_err().to_string();
            assert!(error.starts_with("one mask is for 4 batch entries, the other for 2"), "{error}");
            assert!(parsed(other).and(all.clone()).is_err());
        }
    }

    #[test]
    fn one_mask_serves_all_entries_and_lists_in_lists_are_refused() {
        assert_eq!(Mask::per_entry(vec![parsed("valid:3,4")]).unwrap(), parsed("valid:3,4"));
        assert!(Mask::per_entry(Vec::new()).unwrap_err().is_request());
        for nested in ["causal//full", "valid:3,4"] {
            let error = Mask::per_entry(vec![Mask::full(), parsed(nested)]).unwrap_err();
            assert!(error.to_string().contains("batch entry 1 is itself for 2 batch entries"), "{error}");
        }
    }

    #[test]
    fn a_list_that_does_not_fit_the_problem_is_refused() {
        let fault = |text: &str, batch| parsed(text).fits(batch, 24).unwrap_err().to_string();
        assert!(fault("causal//full", 3).starts_with("2 masks for batch entries, the batch has 3 entries"));
        assert!(fault("causal//full", 1).contains("the batch has 1 entries"));
        assert!(fault("full//documents:0,8", 2).starts_with("batch entry 1: the documents end at 8"));
        assert!(fault("valid:25//full", 2).starts_with("batch entry 0: key padding keeps 25 keys"));
    }

    #[test]
    fn a_document_of_any_entry_has_boundaries() {
        let all = parsed("documents:0,8,24//causal//causal+documents:0,5,8,20,24");
        assert_eq!(*all.document_boundaries(), [0, 5, 8, 20, 24]);
        assert!(parsed("causal//full").document_boundaries().is_empty());
    }

    #[test]
    fn json_and_plan_hashes_name_the_entries_after_the_terms_of_all() {
        let json = |text: &str| serde_json::to_string(&parsed(text)).unwrap();
        let all = json("full");
        assert_eq!(all, r#"{"left":null,"right":null,"valid":[],"documents":[],"unions":[]}"#);
        let entries = format!(r#","entries":[{},{}]}}"#, json("causal"), json("valid:3"));
        assert_eq!(json("causal//valid:3"), all.replace('}', &entries));
    }
}
