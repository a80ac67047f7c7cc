//! All kernels, for a test of a device that loads each of them.

use kyklos::Dtype;
use kyklos::backend::Scales;

use crate::{
    AttendKernel, BackwardKernel, BackwardSums, CodesKernel, Direction, convert_kernel, finalize_kernel,
    row_stats_kernel,
};

/// Every kernel, with its dynamic shared memory per block. `wgmma`: with those for Hopper.
pub(crate) fn all_kernels(wgmma: bool) -> Vec<(String, u32)> {
    let mut all = Vec::new();
    for dtype in Dtype::ALL {
        for dim in (8..=256).step_by(8) {
            let hopper = [AttendKernel::hopper(dtype, dim), AttendKernel::hopper_wide(dtype, dim)];
            let attending = [AttendKernel::tiled(dtype, dim), AttendKernel::decode(dtype, dim, 1)];
            let attending = attending.into_iter().chain(hopper.into_iter().filter(|_| wgmma)).flatten();
            all.extend(attending.map(|kernel| (kernel.name, kernel.shared_bytes)));
            let backward = BackwardKernel::both(dtype, dim).into_iter().flatten();
            let hopper = [BackwardSums::Queries, BackwardSums::Keys]
                .into_iter()
                .filter_map(|makes| BackwardKernel::hopper(makes, dtype, dim))
                .filter(|_| wgmma);
            let backward = backward.chain(BackwardKernel::of_bias(dtype, dim)).chain(hopper);
            all.extend(backward.map(|kernel| (kernel.name, kernel.shared_bytes)));
        }
        for direction in [Direction::ToCodes, Direction::FromCodes] {
            let codes = [Scales::Rows, Scales::Channels]
                .map(|of| CodesKernel::of(direction, of, dtype, [1, 1, 1, 8]));
            all.extend(codes.into_iter().flatten().map(|kernel| (kernel.name, kernel.shared_bytes)));
        }
        let others = [finalize_kernel(dtype), row_stats_kernel(dtype)].map(str::to_owned);
        let conversions = Dtype::ALL.into_iter().filter_map(|into| convert_kernel(dtype, into));
        all.extend(others.into_iter().chain(conversions).map(|name| (name, 0)));
    }
    let small = ["reset_state", "merge_states", "merge_parts", "repack", "accumulate", "clear_words"];
    all.extend(small.map(|name| (name.to_owned(), 0)));
    // A kernel has several head dims.
    all.sort();
    all.dedup();
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The table of registers has a row for each kernel that compilers found.
    #[test]
    fn all_kernels_are_those_that_compilers_find() {
        let budgets = include_str!("../../tests/compilers/budgets.txt");
        for wgmma in [false, true] {
            let rows = budgets.lines().skip(2).filter_map(|line| line.split_whitespace().next());
            let mut names: Vec<_> = rows.filter(|name| wgmma || !name.starts_with("hopper_")).collect();
            names.sort_unstable();
            let all = all_kernels(wgmma);
            assert_eq!(all.iter().map(|(name, _)| name.as_str()).collect::<Vec<_>>(), names);
        }
    }
}
