//! Why the program ends without a result.

use std::path::PathBuf;

/// Each text names the fault and, where there is one, the next step.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A request that cannot be satisfied.
    #[error("{0}")]
    Request(String),
    /// A file of the model is not there.
    #[error("no {file} in {}: run demos/sentence-encoder/fetch-model.sh, or name a folder with --model", .folder.display())]
    NoModel {
        /// The file.
        file: &'static str,
        /// The folder in which it should be.
        folder: PathBuf,
    },
    /// A file of the model is not what it should be.
    #[error("{}: {fault}", .file.display())]
    Model {
        /// The file.
        file: PathBuf,
        /// The fault.
        fault: String,
    },
    /// Attention over the ranks failed: this rank's request, its device, or the group.
    #[error(transparent)]
    Attention(#[from] kyklos::Error),
    /// No plan: the shares or the mask do not fit.
    #[error(transparent)]
    Plan(#[from] kyklos::PlanError),
    /// The group did not form.
    #[error(transparent)]
    Group(#[from] kyklos_launch::Error),
    /// A part of the model that each rank computes by itself failed.
    #[error("the model: {0}")]
    Candle(#[from] candle_core::Error),
    /// A file or a process.
    #[error("{what}: {source}")]
    System {
        /// What was to be done.
        what: String,
        /// The system's error.
        source: std::io::Error,
    },
    /// The ranks computed other embeddings than one process.
    #[error(
        "the embeddings differ from those of one process by {difference:.1e}, more than {allowed:.0e}: please report this"
    )]
    Wrong {
        /// The largest difference of two numbers.
        difference: f32,
        /// What rounding explains.
        allowed: f32,
    },
    /// Processes ended without a result, and have said why.
    #[error("{text}")]
    Processes {
        /// How each of them ended.
        text: String,
        /// Whether one of them has refused the request.
        request: bool,
    },
}

impl Error {
    /// A request that cannot be satisfied: the fault, then the remedy.
    pub fn request(text: impl Into<String>) -> Self {
        Self::Request(text.into())
    }

    /// As [`Self::System`], for `map_err`.
    pub fn system(what: impl Into<String>) -> impl FnOnce(std::io::Error) -> Self {
        let what = what.into();
        move |source| Self::System { what, source }
    }

    /// 2 for a wrong request, 1 for a run that failed.
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Request(_) | Self::NoModel { .. } | Self::Processes { request: true, .. } => 2,
            Self::Attention(error) if error.is_request() => 2,
            Self::Group(error) if error.is_request() => 2,
            _ => 1,
        }
    }
}

/// Results of this program.
pub type Result<T, E = Error> = std::result::Result<T, E>;
