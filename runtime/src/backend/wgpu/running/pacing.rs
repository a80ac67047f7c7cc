//! How large pieces of work are: without a clock and without a device, so that a test can drive it
//! with any device.
//!
//! A piece is short if it has few operations. It has few if it has few workgroups, or if these loop
//! over few keys. Only the second is free: a piece whose workgroups do not fill the device takes as
//! long as one that does, so fewer of them would be slower and not shorter, and the speed that it
//! measures is not that of the device. So a piece never has fewer workgroups than fill it, and keys
//! are cut until so many take a short time on a slow device too. Cuts round, and so do not depend
//! on measurements; the number of workgroups does.

use crate::backend::DeviceClass;

/// Seconds of one submission: short enough for a watchdog and for a user, and long compared with
/// the cost of submitting.
pub(in crate::backend::wgpu) const PIECE_S: f64 = 0.08;

/// What is known about a kind of device before its speed is measured.
#[derive(Clone, Copy, Debug)]
pub(in crate::backend::wgpu) struct Grain {
    /// Assumed speed before the first measurement.
    first_flops_per_s: f64,
    /// Workgroups that fill the device.
    busy_groups: u64,
    /// The least for which the keys of the decoding kernels are split.
    decode_groups: usize,
    /// Most operations of `busy_groups` workgroups between two cuts of their keys.
    most_flops: f64,
}

/// How much work a piece has.
#[derive(Clone, Copy, Debug)]
pub(in crate::backend::wgpu) struct Size {
    /// About so many operations,
    pub(in crate::backend::wgpu) flops: f64,
    /// or those of so many workgroups, if these are more.
    pub(in crate::backend::wgpu) fewest_groups: u64,
}

impl Grain {
    pub(in crate::backend::wgpu) fn new(class: DeviceClass) -> Self {
        // Too low a speed only makes the first pieces short; too high a speed could exceed a watchdog's 2
        // s. The operations between two cuts take a tenth of a second on a GPU that reaches 30
        // GFLOP/s. A discrete GPU reaches more, and kernels for matrix units would notice that
        // shorter loops read and write more of the state. A browser does not say what kind of GPU
        // it has.
        let (first_flops_per_s, busy_groups, decode_groups, most_flops) = match class {
            DeviceClass::SoftwareGpu | DeviceClass::Cpu => (2e9, 32, 16, 2e8),
            DeviceClass::IntegratedGpu => (3e10, 256, 96, 3e9),
            DeviceClass::DiscreteGpu => (1e11, 512, 256, 3.5e10),
            _ => (3e10, 512, 256, 3e9),
        };
        Self { first_flops_per_s, busy_groups, decode_groups, most_flops }
    }

    /// Keys, or rows, between two cuts of the loops of `items` workgroups, each with
    /// `flops_per_key`: whole tiles of `tile` keys, and at least one. A few workgroups take more
    /// keys each, but not all that the others leave.
    pub(in crate::backend::wgpu) fn keys_at_once(
        &self,
        flops_per_key: f64,
        items: u64,
        tile: usize,
    ) -> usize {
        let groups = items.clamp(self.busy_groups / 16, self.busy_groups);
        let groups = u32::try_from(groups).expect("the number of groups that fill a device is small");
        let keys = self.most_flops / (f64::from(groups) * flops_per_key);
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "positive, and far below 2^52"
        )]
        let keys = keys as usize;
        whole_tiles(keys, tile)
    }

    /// Target number of workgroups for the splits of the keys of the decoding kernels.
    pub(in crate::backend::wgpu) fn decode_groups(&self) -> usize {
        self.decode_groups
    }

    /// The size of a piece of a kernel of this speed.
    pub(in crate::backend::wgpu) fn size(&self, speed: Speed) -> Size {
        Size { flops: PIECE_S * speed.flops_per_s, fewest_groups: self.busy_groups }
    }

    /// The speed of a kernel before the first measurement.
    pub(in crate::backend::wgpu) fn first_speed(&self) -> Speed {
        Speed { flops_per_s: self.first_flops_per_s }
    }
}

/// `keys` without a part of a tile, and at least one tile.
pub(in crate::backend::wgpu) fn whole_tiles(keys: usize, tile: usize) -> usize {
    (keys / tile).max(1) * tile
}

/// Assumed or measured speed of a kernel.
#[derive(Clone, Copy, Debug)]
pub(in crate::backend::wgpu) struct Speed {
    flops_per_s: f64,
}

impl Speed {
    /// Seconds of `flops`.
    pub(in crate::backend::wgpu) fn seconds(self, flops: f64) -> f64 {
        flops / self.flops_per_s
    }

    /// A piece of `flops` took `took_s`.
    pub(in crate::backend::wgpu) fn measured(&mut self, flops: f64, took_s: f64) {
        // A shorter time measures the submission, not the device.
        let measured = flops / took_s.max(1e-3);
        // Adapts at once to a lower speed, and gradually to a higher one.
        if measured >= self.flops_per_s {
            self.flops_per_s = 0.5 * (self.flops_per_s + measured);
        } else if took_s > 1e-3 {
            self.flops_per_s = measured;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use super::*;
    use crate::backend::wgpu::running::items::Items;

    /// A GPU that computes `slots` workgroups at a time, and submissions one after the other.
    #[derive(Clone, Copy, Debug)]
    struct Gpu {
        class: DeviceClass,
        flops_per_s: f64,
        slots: u32,
    }

    const GPUS: [Gpu; 9] = [
        Gpu { class: DeviceClass::DiscreteGpu, flops_per_s: 20e12, slots: 528 },
        Gpu { class: DeviceClass::DiscreteGpu, flops_per_s: 2e12, slots: 144 },
        Gpu { class: DeviceClass::OtherGpu, flops_per_s: 20e12, slots: 528 },
        Gpu { class: DeviceClass::IntegratedGpu, flops_per_s: 1e12, slots: 32 },
        Gpu { class: DeviceClass::IntegratedGpu, flops_per_s: 300e9, slots: 48 },
        Gpu { class: DeviceClass::IntegratedGpu, flops_per_s: 100e9, slots: 24 },
        Gpu { class: DeviceClass::IntegratedGpu, flops_per_s: 30e9, slots: 12 },
        Gpu { class: DeviceClass::SoftwareGpu, flops_per_s: 2e9, slots: 2 },
        Gpu { class: DeviceClass::SoftwareGpu, flops_per_s: 60e9, slots: 32 },
    ];

    /// Workgroups that loop over keys, or splits of keys.
    #[derive(Clone, Copy, Debug)]
    struct Call {
        heads: usize,
        tiles: usize,
        keys: usize,
        flops_per_key: f64,
        loops: Loops,
    }

    #[derive(Clone, Copy, Debug, PartialEq)]
    enum Loops {
        Forward,
        Backward,
        Decode,
    }

    const fn forward(heads: usize, tiles: usize, keys: usize, flops_per_key: f64) -> Call {
        Call { heads, tiles, keys, flops_per_key, loops: Loops::Forward }
    }

    const fn backward(heads: usize, tiles: usize, keys: usize, flops_per_key: f64) -> Call {
        Call { heads, tiles, keys, flops_per_key, loops: Loops::Backward }
    }

    const CALLS: [Call; 8] = [
        // Forward: 75,600 tokens with 40 heads of 128, 6000 with one of 256, 1024 with 8 of 64; one tile of
        // rows.
        forward(40, 2363, 75_600, 4.0 * 32.0 * 128.0),
        forward(1, 188, 6000, 4.0 * 32.0 * 256.0),
        forward(8, 32, 1024, 4.0 * 32.0 * 64.0),
        forward(1, 1, 75_600, 4.0 * 32.0 * 128.0),
        // Backward: three products for each query head, and four for 8 query heads of a KV head.
        backward(40, 2363, 75_600, 2.0 * 3.0 * 32.0 * 128.0),
        backward(5, 2363, 75_600, 2.0 * 4.0 * 8.0 * 32.0 * 128.0),
        backward(1, 1, 75_600, 2.0 * 3.0 * 32.0 * 128.0),
        // A row of queries that looks at a million keys.
        Call { heads: 8, tiles: 1, keys: 1 << 20, flops_per_key: 4.0 * 8.0 * 128.0, loops: Loops::Decode },
    ];

    /// What slows a device down.
    #[derive(Clone, Copy, Debug)]
    enum Trouble {
        None,
        /// The third piece takes so many seconds longer.
        Hiccup(f64),
        /// For so many seconds the clock is a third of what it is then.
        Ramp(f64),
    }

    #[derive(Debug)]
    struct Times {
        total_s: f64,
        /// Of all work in one submission.
        ideal_s: f64,
        /// Of a piece, without a hiccup.
        longest_s: f64,
        fewest_groups: u64,
    }

    fn run(gpu: Gpu, call: Call, trouble: Trouble) -> Times {
        let Gpu { class, flops_per_s, slots } = gpu;
        let grain = Grain::new(class);
        let items = (call.heads * call.tiles) as u64;
        // The keys of the workgroups of one dispatch each, and how many workgroups have the keys of a tile
        // and head.
        let (step, splits) = match call.loops {
            Loops::Decode => {
                (call.keys, call.keys.div_ceil(grain.keys_at_once(call.flops_per_key, u64::MAX, 64)))
            }
            Loops::Forward => (grain.keys_at_once(call.flops_per_key, u64::MAX, 32), 1),
            Loops::Backward => (grain.keys_at_once(call.flops_per_key, items, 32), 1),
        };
        let rounds =
            |groups: u64| f64::from(u32::try_from(groups).unwrap().div_ceil(slots)) * f64::from(slots);
        let (mut speed, mut flights) = (grain.first_speed(), VecDeque::new());
        let (mut now_s, mut pieces) = (0.0, 0);
        let mut times = Times { total_s: 0.0, ideal_s: 0.0, longest_s: 0.0, fewest_groups: u64::MAX };
        for first in (0..call.keys).step_by(step) {
            if now_s > 100.0 {
                break; // from here on nothing changes
            }
            let keys = u32::try_from(step.min(call.keys - first).div_ceil(splits)).unwrap();
            let of_item = f64::from(keys) * call.flops_per_key;
            times.ideal_s += rounds(items * splits as u64) * of_item / flops_per_s;
            let met = vec![vec![keys; call.tiles * splits]];
            let mut items = Items::new(met, &(0..1), call.heads, call.flops_per_key);
            while let Some((piece, flops)) = items.next(grain.size(speed)) {
                // Two are in flight; the speed of the first of them is not known before it is done.
                if flights.len() == 2 {
                    let (flops, took_s) = flights.pop_front().unwrap();
                    speed.measured(flops, took_s);
                }
                let slower =
                    if matches!(trouble, Trouble::Ramp(until_s) if now_s < until_s) { 3.0 } else { 1.0 };
                let took_s = slower * rounds(piece.end - piece.start) * of_item / flops_per_s;
                times.longest_s = times.longest_s.max(took_s);
                times.fewest_groups = times.fewest_groups.min(piece.end - piece.start);
                let took_s = match trouble {
                    Trouble::Hiccup(more_s) if pieces == 2 => took_s + more_s,
                    _ => took_s,
                };
                pieces += 1;
                now_s += took_s;
                flights.push_back((flops, took_s));
            }
        }
        times.total_s = now_s;
        match trouble {
            Trouble::None => {}
            Trouble::Hiccup(more_s) => times.ideal_s += if pieces > 2 { more_s } else { 0.0 },
            Trouble::Ramp(until_s) => {
                times.ideal_s = (times.ideal_s + until_s / 1.5).min(3.0 * times.ideal_s)
            }
        }
        times
    }

    #[test]
    fn pieces_fill_every_device_and_are_short() {
        for (gpu, call) in GPUS.iter().flat_map(|gpu| CALLS.iter().map(move |call| (*gpu, *call))) {
            for trouble in [Trouble::None, Trouble::Hiccup(0.5), Trouble::Ramp(2.0)] {
                let times = run(gpu, call, trouble);
                let of = format!("{gpu:?}, {call:?}, {trouble:?}: {times:?}");
                let items = (call.heads * call.tiles) as u64;
                let fill = Grain::new(gpu.class).busy_groups.min(if call.loops == Loops::Decode {
                    u64::MAX
                } else {
                    items
                });
                assert!(times.fewest_groups >= fill, "{of}");
                assert!(times.total_s <= 1.3 * times.ideal_s, "{of}");
                assert!(times.longest_s <= 0.5, "{of}");
            }
        }
    }
}
