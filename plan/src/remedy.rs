//! The change by which a caller can repair a refused request.

use std::fmt;

/// A request that would be accepted in place of the refused one.
///
/// `Display` writes it in terms of this library. A front end whose users choose by options, flags
/// or configuration keys matches on the variants and names its own option beside the text. It never
/// looks into the text, which may quote another rank.
///
/// ```
/// use kyklos_plan::{AttentionProblem, Dtype, Error, Mask, Mesh, Remedy};
///
/// let problem = AttentionProblem::new([1, 64, 3, 3, 64], Dtype::F32, Mask::full())?;
/// let error = Mesh::new(4, 1)?.fits(&problem).unwrap_err();
/// if let Error::Request { remedy: Remedy::UseMesh { ulysses, ring }, .. } = &error {
///     println!("{error}; hint: --mesh {ulysses}x{ring}");
/// }
/// # Ok::<(), Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Remedy {
    /// Advice that reads the same for every caller.
    Text(String),
    /// Use a mesh of these extents, or any ring (Ulysses extent 1).
    UseMesh {
        /// Ranks of a Ulysses group; divides the number of ranks of the refused mesh.
        ulysses: u32,
        /// Shards of the ring.
        ring: u32,
    },
    /// Give each rank this many tokens ([`Split::Tokens`](crate::Split::Tokens)), by rank; they add
    /// up to the sequence length.
    UseTokens(Vec<u32>),
    /// Give token counts that add up to the sequence length, or weights
    /// ([`Split::Weights`](crate::Split::Weights)).
    CompleteTokensOrUseWeights,
    /// Give counts for the queries and counts for the keys
    /// ([`Split::Separate`](crate::Split::Separate)), or weights
    /// ([`Split::Weights`](crate::Split::Weights)), if the number of queries differs from the
    /// number of keys.
    CountEachSideOrUseWeights,
    /// Give query counts that add up to `total`: all queries of the problem.
    CompleteQueryCounts {
        /// Number of queries.
        total: u32,
    },
    /// Give key counts that add up to `total`: all keys of the problem that are not replicated.
    CompleteKeyCounts {
        /// Number of keys that have an owner.
        total: u32,
    },
    /// Describe how fast this kind of device computes attention in the problem's dtype, or use
    /// another dtype.
    DescribeDtypeOrUseAnother {
        /// The key of the device in the cluster description, as in `[device.KEY]`.
        device: String,
    },
}

impl fmt::Display for Remedy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Text(text) => f.write_str(text),
            Self::UseMesh { ulysses, ring } => write!(f, "use a mesh of {ulysses} x {ring}, or a ring"),
            Self::UseTokens(counts) => {
                f.write_str("use token counts ")?;
                for (rank, count) in counts.iter().enumerate() {
                    write!(f, "{}{count}", if rank == 0 { "" } else { ", " })?;
                }
                Ok(())
            }
            Self::CompleteTokensOrUseWeights => {
                f.write_str("give counts that add up to the sequence length, or weights")
            }
            Self::CountEachSideOrUseWeights => {
                f.write_str("give counts for the queries and counts for the keys, or weights, where the two lengths differ")
            }
            Self::CompleteQueryCounts { total } => write!(f, "give query counts that add up to {total}"),
            Self::CompleteKeyCounts { total } => {
                write!(f, "give key counts that add up to {total}; replicated keys are not counted")
            }
            Self::DescribeDtypeOrUseAnother { device } => {
                write!(f, "add a [[device.{device}.attention]] of that dtype, or use another dtype")
            }
        }
    }
}

impl From<String> for Remedy {
    fn from(text: String) -> Self {
        Self::Text(text)
    }
}

impl From<&str> for Remedy {
    fn from(text: &str) -> Self {
        Self::Text(text.to_owned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_library_words_a_remedy_without_the_options_of_a_program() {
        let remedies = [
            Remedy::from("use a positive softcap, or none"),
            Remedy::UseMesh { ulysses: 2, ring: 3 },
            Remedy::UseTokens(vec![512, 256]),
            Remedy::CompleteTokensOrUseWeights,
            Remedy::CountEachSideOrUseWeights,
            Remedy::CompleteQueryCounts { total: 8 },
            Remedy::CompleteKeyCounts { total: 8 },
            Remedy::DescribeDtypeOrUseAnother { device: "gpu".to_owned() },
        ];
        for remedy in &remedies {
            assert!(!remedy.to_string().contains("--"), "{remedy}");
        }
        assert_eq!(remedies[1].to_string(), "use a mesh of 2 x 3, or a ring");
        assert_eq!(remedies[2].to_string(), "use token counts 512, 256");
    }
}
