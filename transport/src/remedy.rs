//! What to do about an error, in words that belong to no program.

use std::fmt;

/// What to do about an error.
///
/// The words of a remedy are part of the error's text, also where that text comes from a peer. So a program that has
/// a command for a remedy can find the words in any text, and put its own in their place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Remedy {
    /// Issue a new certificate for the rank or the host.
    IssueCertificate,
    /// Issue all certificates from one authority, or ones that trust both authorities.
    TrustBothAuthorities,
    /// Make an authority in a new folder.
    MakeAuthority,
    /// Make an invitation, and with it a new token.
    MakeInvitation,
    /// Copy the token again, from its first to its last character.
    CopyWholeToken,
    /// Start rank 0 with its invitation.
    StartWithInvitation,
    /// Start the rank with the identity that it got before, instead of a token.
    KeepIdentity,
    /// Write key hashes into the list of revoked keys.
    WriteKeyHash,
}

impl Remedy {
    /// Every remedy.
    pub const ALL: &[Self] = &[
        Self::IssueCertificate,
        Self::TrustBothAuthorities,
        Self::MakeAuthority,
        Self::MakeInvitation,
        Self::CopyWholeToken,
        Self::StartWithInvitation,
        Self::KeepIdentity,
        Self::WriteKeyHash,
    ];

    /// The remedy in an error's text. No other text has these words in it.
    pub const fn words(self) -> &'static str {
        match self {
            Self::IssueCertificate => "issue a new certificate",
            Self::TrustBothAuthorities => {
                "issue all certificates from one authority, or issue certificates that trust both"
            }
            Self::MakeAuthority => "make a new authority",
            Self::MakeInvitation => "make a new invitation",
            Self::CopyWholeToken => "copy the whole token",
            Self::StartWithInvitation => "start rank 0 with the invitation",
            Self::KeepIdentity => "start that rank again with the identity that it got",
            Self::WriteKeyHash => "begin each line with the 64 hexadecimal digits of a key hash",
        }
    }

    /// The first remedy that a text names, wherever the text comes from.
    pub fn in_text(text: &str) -> Option<Self> {
        let found = Self::ALL.iter().filter_map(|remedy| Some((text.find(remedy.words())?, *remedy)));
        found.min_by_key(|(at, _)| *at).map(|(_, remedy)| remedy)
    }
}

impl fmt::Display for Remedy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.words())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_remedy_is_found_by_its_words_and_no_words_contain_others() {
        for remedy in Remedy::ALL {
            let text =
                format!("rank 1 at 10.0.0.1 gave no identity: a reason: {remedy}; turned away: another");
            assert_eq!(Remedy::in_text(&text), Some(*remedy));
            let contained = Remedy::ALL.iter().filter(|other| remedy.words().contains(other.words()));
            assert_eq!(contained.count(), 1, "{remedy}");
        }
        assert_eq!(Remedy::in_text("rank 0 did not answer"), None);
    }

    #[test]
    fn the_first_of_several_remedies_counts() {
        let text = format!("{}; {}", Remedy::MakeInvitation, Remedy::IssueCertificate);
        assert_eq!(Remedy::in_text(&text), Some(Remedy::MakeInvitation));
    }
}
