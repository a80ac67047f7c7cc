//! Numbers and names of `backward/portable.wgsl`.

use minijinja::context;
use minijinja::value::Value;

use super::variant::{BackwardKernel, Sums};
use crate::Vendor;

pub(crate) const THREADS: u32 = 64;
/// Threads in a row of the grid, rows of threads, and units that are in workgroup memory at a
/// time.
pub(crate) const SIDE: u32 = 8;
/// Moving rows of a tile, and rows and keys of those of the list.
pub(crate) const COLS: u32 = 32;

/// Fixed rows of one thread: as many as spill no register by the vendors' compilers, and on NVIDIA
/// leave 16 warps up to 64 elements and 12 up to 128 (`tests/vendors/ceilings.toml`).
pub(crate) const fn rows_per_thread(vendor: Vendor, sums: Sums, head_dim: u32) -> u32 {
    let most = match (vendor, sums) {
        (Vendor::Nvidia, Sums::KeysValues) | (Vendor::Intel | Vendor::Other, _) => 2,
        (Vendor::Amd | Vendor::Nvidia | Vendor::Software, _) => 4,
    };
    // Sums of a thread: 64, or 32.
    let elements = match sums {
        Sums::KeysValues => 2 * head_dim,
        Sums::Bias | Sums::SharedBias => return most,
        Sums::Queries | Sums::Keys | Sums::Values => head_dim,
    };
    let fits = match vendor {
        Vendor::Amd | Vendor::Nvidia | Vendor::Software => 512 / elements,
        Vendor::Intel | Vendor::Other => 256 / elements,
    };
    if fits >= most {
        most
    } else if fits >= 2 {
        2
    } else {
        1
    }
}

pub(crate) const fn workgroup_bytes(kernel: &BackwardKernel) -> u32 {
    let fixed = SIDE * kernel.tile_rows();
    let tensors = if kernel.sums.needs_scores() { 2 } else { 1 };
    16 * tensors * (fixed + SIDE * COLS)
}

/// What is read for each product, S and dP: name, fixed tensor, moving tensor.
pub(crate) const fn products(sums: Sums) -> [(&'static str, &'static str, &'static str); 2] {
    if sums.rows_are_fixed() {
        [("S", "q", "k"), ("dP", "d_o", "v")]
    } else {
        [("S", "k", "q"), ("dP", "v", "d_o")]
    }
}

pub(crate) fn values(kernel: BackwardKernel, vendor: Vendor) -> Value {
    let sums = kernel.sums;
    let products = products(sums);
    let count = if sums.needs_scores() { 2 } else { 1 };
    let areas: Vec<Value> = products
        .into_iter()
        .enumerate()
        .take(count)
        .map(|(index, (name, fixed, moving))| context! { index, name, fixed, moving })
        .collect();
    let sum = |name, weight, factors, index: usize, factor| {
        // The kernel of dV alone has one area, which is free by then.
        let area = format!("moving{}", index.min(count - 1));
        context! { name, weight, factors, moving => products[index].2, area, factor }
    };
    let scores = || sum(kernel.sum_of_scores(), "dS", "fixed1", 0, " * params.scale");
    let weights = || sum("dv", "P", "fixed0", 1, "");
    let added = match sums {
        Sums::Queries | Sums::Keys => vec![scores()],
        Sums::KeysValues => vec![scores(), weights()],
        Sums::Values => vec![weights()],
        Sums::Bias | Sums::SharedBias => Vec::new(),
    };
    let units = kernel.storage.units(kernel.head_dim);
    context! {
        tile_rows => kernel.tile_rows(),
        rows => rows_per_thread(vendor, sums, kernel.head_dim),
        passes => units.div_ceil(SIDE),
        // Chunks of a sum that a thread holds for each row: of f32 1 of each pass; of 16-bit types 2, 1 of a last pass with at
        // most half of the units.
        held => kernel.head_dim.div_ceil(4 * SIDE),
        scores => sums.needs_scores(),
        unit_type => kernel.storage.unit_type(),
        areas,
        sums => added,
    }
}
