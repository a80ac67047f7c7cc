//! Closed lists of named things: the name of each, and the file with its facts.

/// Defines a closed enum from a list of `Variant, "name", file, "One sentence.";` lines: the enum,
/// its list, names, texts.
macro_rules! named_enum {
    (
        $(#[$meta:meta])*
        $Name:ident, $what:literal:
        $($variant:ident, $name:literal, $file:ident, $summary:literal;)*
    ) => {
        $(#[$meta])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum $Name {
            $(#[doc = $summary] $variant,)*
        }

        impl $Name {
            /// All of them, in the order of the list.
            pub const ALL: [Self; [$($name),*].len()] = [$(Self::$variant),*];

            /// The name on the command line, in reports and in the plan hash.
            pub const fn name(self) -> &'static str {
                match self {
                    $(Self::$variant => $name,)*
                }
            }

            /// What it does, in one sentence.
            pub const fn summary(self) -> &'static str {
                match self {
                    $(Self::$variant => $summary,)*
                }
            }

            /// All names, joined by commas: for help texts.
            pub fn names() -> String {
                Self::ALL.map(Self::name).join(", ")
            }
        }

        impl std::fmt::Display for $Name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str(self.name())
            }
        }

        impl std::str::FromStr for $Name {
            type Err = crate::error::Error;

            fn from_str(text: &str) -> crate::error::Result<Self> {
                Self::ALL.into_iter().find(|known| known.name() == text).ok_or_else(|| {
                    crate::error::Error::request(
                        format!(concat!($what, " `{}` is not known"), text),
                        format!("use one of {}", Self::names()),
                    )
                })
            }
        }

        impl serde::Serialize for $Name {
            fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                serializer.serialize_str(self.name())
            }
        }
    };
}

/// Maps a variant of such a list to the constant `FACTS` in its file, which is in the module `$at`.
macro_rules! facts_of_each {
    (
        $Name:ident, $Facts:ty, $at:ident:
        $($variant:ident, $name:literal, $file:ident, $summary:literal;)*
    ) => {
        impl $Name {
            /// All facts that other modules need.
            pub(crate) fn facts(self) -> &'static $Facts {
                match self {
                    $(Self::$variant => &$at::$file::FACTS,)*
                }
            }
        }
    };
}

pub(crate) use {facts_of_each, named_enum};
