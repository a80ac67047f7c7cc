//! The texts of the kernels, embedded for NVRTC.

/// Names and texts of the sources. Sources include each other by these names; the first,
/// `kernels.cu`, is the one to compile.
pub const SOURCES: [(&str, &str); 23] = [
    ("kernels.cu", include_str!("../../kernels/kernels.cu")),
    ("arguments.h", include_str!("../../kernels/arguments.h")),
    ("ptx.h", include_str!("../../kernels/cuda/ptx.h")),
    ("ptx_hopper.h", include_str!("../../kernels/cuda/ptx_hopper.h")),
    ("logits.h", include_str!("../../kernels/logits.h")),
    ("rows.h", include_str!("../../kernels/rows.h")),
    ("attend.h", include_str!("../../kernels/attend.h")),
    ("attend_hopper.h", include_str!("../../kernels/attend_hopper.h")),
    ("hopper.h", include_str!("../../kernels/hopper.h")),
    ("attend_f32.h", include_str!("../../kernels/attend_f32.h")),
    ("backward/common.h", include_str!("../../kernels/backward/common.h")),
    ("backward/bias.h", include_str!("../../kernels/backward/bias.h")),
    ("backward/f32.h", include_str!("../../kernels/backward/f32.h")),
    ("backward_hopper.h", include_str!("../../kernels/backward_hopper.h")),
    ("backward/keys.h", include_str!("../../kernels/backward/keys.h")),
    ("backward/queries.h", include_str!("../../kernels/backward/queries.h")),
    ("backward/tiles.h", include_str!("../../kernels/backward/tiles.h")),
    ("row_stats.h", include_str!("../../kernels/row_stats.h")),
    ("decode.h", include_str!("../../kernels/decode.h")),
    ("state.h", include_str!("../../kernels/state.h")),
    ("repack.h", include_str!("../../kernels/repack.h")),
    ("convert.h", include_str!("../../kernels/convert.h")),
    ("codes.h", include_str!("../../kernels/codes.h")),
];

#[cfg(test)]
mod tests {
    use super::*;

    /// NVRTC has no include folder.
    #[test]
    fn every_included_header_is_embedded() {
        let includes = |text: &'static str| {
            text.lines().filter_map(|line| line.strip_prefix("#include \"")?.strip_suffix('"'))
        };
        let mut all: Vec<_> = SOURCES.iter().flat_map(|(_, text)| includes(text)).collect();
        all.sort_unstable();
        all.dedup();
        let mut headers: Vec<_> = SOURCES[1..].iter().map(|(name, _)| *name).collect();
        headers.sort_unstable();
        assert_eq!(all, headers);
    }
}
