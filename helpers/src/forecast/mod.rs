//! Who computes what: shares of a call by the speeds of devices and links, and the time that they
//! take. Pure: no device, no network, no clock.

use std::ops::Range;

use kyklos::{BiasTensor, Mask, Result};
use kyklos_plan::simulate::visible_pairs;

use crate::call::{Call, Part, Shape};
use crate::encoding::{Encoding, Role};
use crate::message::{keys_shape, queries_shape, result_role, result_shapes};

/// How fast a device attends in calls of one class.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DeviceSpeed {
    /// Visible (query, key) pairs of all heads in a second.
    pub pairs_per_s: f64,
    /// Seconds of a call with hardly any work.
    pub step_s: f64,
}

/// How fast a link moves bytes, seen from the owner.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LinkSpeed {
    /// To the helper.
    pub up_bytes_per_s: f64,
    /// From the helper.
    pub down_bytes_per_s: f64,
    /// Seconds of a message of a few bytes.
    pub hop_s: f64,
}

/// A helper, as a forecast needs to know it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct HelperSpeed {
    /// Its device.
    pub device: DeviceSpeed,
    /// Its link.
    pub link: LinkSpeed,
    /// Bytes of tensors that it takes at a time; none: not known.
    pub memory_bytes: Option<u64>,
    /// Seconds that its last calls took, over those that were forecast.
    pub slowness: f64,
}

/// The owner.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct OwnerSpeed {
    /// Its device, beside the messages of helpers.
    pub device: DeviceSpeed,
    /// Pairs in a second of its device in calls without helpers, which may be more.
    pub alone_pairs_per_s: f64,
    /// Bytes that it copies from its tensors to messages, or back, in a second.
    pub copies_bytes_per_s: f64,
}

/// The part of one helper in a call.
#[derive(Clone, Debug, PartialEq)]
pub struct Share {
    /// The helper: its index in what [`Cuts::forecast`] was given, or of a forecast of an
    /// [`Owner`](crate::Owner) its number there.
    pub helper: u64,
    /// What it computes, in this order. Consecutive parts of the same heads share their keys.
    pub parts: Vec<Part>,
    /// Its part of the call's pairs, between 0 and 1.
    pub fraction: f64,
    /// When its last result is with the owner, in seconds.
    pub end_s: f64,
    /// Seconds of its link to the helper, of its device, and of its link back.
    pub busy_s: [f64; 3],
    /// Bytes to the helper, and back.
    pub bytes: [u64; 2],
}

/// How a call is shared, and what that takes.
#[derive(Clone, Debug, PartialEq)]
pub struct Forecast {
    /// What the owner computes itself.
    pub own: Vec<Part>,
    /// What helpers compute; empty: the owner computes everything.
    pub shares: Vec<Share>,
    /// Seconds of the call.
    pub total_s: f64,
    /// Seconds of the call if the owner computes everything.
    pub alone_s: f64,
}

impl Forecast {
    /// `alone_s` over `total_s`.
    pub fn gain(&self) -> f64 {
        self.alone_s / self.total_s.max(f64::MIN_POSITIVE)
    }
}

/// A call that can be cut: into heads, and into rows where heads are few.
#[derive(Debug)]
pub struct Cuts {
    shape: Shape,
    encoding: Encoding,
    gradients: bool,
    bias: Option<BiasTensor>,
    /// Whether a helper can be told of it.
    can_travel: bool,
    /// The rows of the blocks of each head.
    blocks: Vec<Range<u32>>,
    /// Pairs of each block of one key/value head, times the work of gradients.
    weights: Vec<f64>,
}

impl Cuts {
    /// The cuts of a call for at most `helpers` helpers.
    ///
    /// # Errors
    /// [`kyklos::Error::Request`] for a call that no device can compute.
    pub fn new(call: &Call, shape: &Shape, helpers: usize) -> Result<Self> {
        let problem = call.problem(shape)?;
        // The gradients of keys are sums over all rows: these calls are cut into heads only.
        let wanted = SLOTS_PER_DEVICE * (u32::try_from(helpers).unwrap_or(64) + 1);
        let wanted = if call.gradients { 1 } else { wanted.div_ceil(shape.kv_heads.max(1)) };
        let blocks = cut(0..shape.q_len, wanted);
        let products = if call.gradients { GRADIENT_WORK } else { 1.0 };
        let pairs =
            |rows: &Range<u32>| visible_pairs(&problem, rows.clone()) * f64::from(shape.group()) * products;
        let weights = blocks.iter().map(pairs).collect();
        let bias = call.bias.as_ref().map(|(tensor, _)| *tensor);
        let encoding = Encoding::new(shape.dtype, call.wire)?;
        let mask = call.mask.to_string();
        let can_travel =
            mask.len() <= MOST_MASK_BYTES && mask.parse().is_ok_and(|read: Mask| read == call.mask);
        Ok(Self { shape: *shape, encoding, gradients: call.gradients, bias, can_travel, blocks, weights })
    }

    /// Pairs of the whole call; of gradients as many as take the same time.
    pub fn pairs(&self) -> f64 {
        self.weights.iter().sum::<f64>() * f64::from(self.shape.kv_heads)
    }

    fn slots(&self) -> usize {
        self.blocks.len() * self.shape.kv_heads as usize
    }

    fn weight(&self, slots: Range<usize>) -> f64 {
        slots.map(|slot| self.weights[slot % self.blocks.len()]).sum()
    }

    /// Slots as parts: the last rows of a head, whole heads, the first rows of another one.
    fn parts(&self, slots: Range<usize>) -> Vec<Part> {
        let count = self.blocks.len();
        let mut parts: Vec<Part> = Vec::new();
        for slot in slots {
            let head = u32::try_from(slot / count).unwrap_or(u32::MAX);
            let rows = self.blocks[slot % count].clone();
            match parts.last_mut().filter(|part| part.kv_heads == (head..head + 1)) {
                Some(part) => part.rows.end = rows.end,
                None => parts.push(Part { kv_heads: head..head + 1, rows }),
            }
        }
        let mut merged: Vec<Part> = Vec::new();
        for part in parts {
            let whole = |part: &Part| part.rows == (0..self.shape.q_len);
            match merged.last_mut().filter(|last| whole(last) && whole(&part)) {
                Some(last) => last.kv_heads.end = part.kv_heads.end,
                None => merged.push(part),
            }
        }
        merged
    }

    /// These parts in pieces, about `count` of them: several heads, or rows of one.
    fn pieces(&self, parts: Vec<Part>, count: u32) -> Vec<Part> {
        let heads: u32 = parts.iter().map(|part| part.kv_heads.end - part.kv_heads.start).sum();
        let mut pieces = Vec::new();
        for part in parts {
            let part_heads = part.kv_heads.end - part.kv_heads.start;
            if part_heads > 1 {
                let each = heads.div_ceil(count).max(1);
                let mut start = part.kv_heads.start;
                while start < part.kv_heads.end {
                    let end = (start + each).min(part.kv_heads.end);
                    pieces.push(Part { kv_heads: start..end, rows: part.rows.clone() });
                    start = end;
                }
            } else if self.gradients || count == 1 {
                pieces.push(part);
            } else {
                let rows = cut(part.rows.clone(), count.div_ceil(heads));
                let piece = |rows| Part { kv_heads: part.kv_heads.clone(), rows };
                pieces.extend(rows.into_iter().map(piece));
            }
        }
        pieces
    }

    /// Bytes of a piece's messages in this form, to the helper and back.
    fn bytes(&self, encoding: Encoding, piece: &Part, new_keys: bool) -> [u64; 2] {
        let shape = piece.shape(&self.shape);
        let of = |shape, role| encoding.part_bytes(shape, role).iter().sum::<usize>() as u64;
        let (q, kv) = (queries_shape(&shape), keys_shape(&shape));
        let mut up = of(q, Role::Rows);
        if self.gradients {
            up += of(q, Role::Gradients);
        }
        if new_keys {
            up += of(kv, Role::Keys) + of(kv, Role::Rows);
        }
        if let Some(bias) = self.bias {
            let heads = if bias.heads == 1 { 1 } else { shape.q_heads };
            up += BiasTensor { heads, ..bias }.bytes(shape.dtype, shape.q_len, shape.kv_len);
        }
        let role = result_role(self.gradients);
        let down = result_shapes(&shape, self.gradients).into_iter().map(|shape| of(shape, role)).sum();
        [up, down]
    }

    /// What a helper takes for these slots: its share, in as many pieces as are fastest.
    fn share(&self, helper: u64, speed: &HelperSpeed, slots: Range<usize>) -> Option<Share> {
        let weight = self.weight(slots.clone());
        let all = self.pairs();
        let each = COUNTS.iter().filter_map(|count| {
            let parts = self.pieces(self.parts(slots.clone()), *count);
            self.run(helper, speed, parts, weight, all)
        });
        each.min_by(|a, b| a.end_s.total_cmp(&b.end_s))
    }

    /// The pieces one after the other over three stations: the link to the helper, its device, the
    /// link back. None if the helper has not the memory.
    fn run(
        &self,
        helper: u64,
        speed: &HelperSpeed,
        parts: Vec<Part>,
        weight: f64,
        all: f64,
    ) -> Option<Share> {
        let &HelperSpeed { device, link, memory_bytes, slowness } = speed;
        // On the helper's device they are as they were before they were coded.
        let plain = self.encoding.plain();
        let (mut arrives, mut computed, mut back) = (link.hop_s, 0.0_f64, 0.0_f64);
        let (mut busy_s, mut bytes, mut largest) = ([0.0; 3], [0, 0], [0, 0]);
        let mut before: Option<&Part> = None;
        for part in &parts {
            let new_keys = before.is_none_or(|before| before.kv_heads != part.kv_heads);
            let [up, down] = self.bytes(self.encoding, part, new_keys);
            let [holds_up, holds_down] = self.bytes(plain, part, new_keys);
            let pairs = self.pairs_of(part);
            let stations = [
                float(up) / link.up_bytes_per_s,
                pairs / device.pairs_per_s + device.step_s,
                float(down) / link.down_bytes_per_s,
            ];
            arrives += stations[0];
            computed = computed.max(arrives) + stations[1];
            back = back.max(computed) + stations[2];
            for (sum, station) in busy_s.iter_mut().zip(stations) {
                *sum += station;
            }
            bytes = [bytes[0] + up, bytes[1] + down];
            largest = [largest[0].max(holds_up), largest[1].max(holds_down)];
            before = Some(part);
        }
        // Pieces arrive and leave while one is computed, and each is on the device too.
        let holds = WINDOW as u64 * 2 * (largest[0] + largest[1]);
        if memory_bytes.is_some_and(|memory| holds > memory) {
            return None;
        }
        let end_s = (back + 2.0 * link.hop_s) * slowness;
        Some(Share { helper, parts, fraction: weight / all.max(f64::MIN_POSITIVE), end_s, busy_s, bytes })
    }

    fn pairs_of(&self, part: &Part) -> f64 {
        let heads = f64::from(part.kv_heads.end - part.kv_heads.start);
        let mut pairs = 0.0;
        for (rows, weight) in self.blocks.iter().zip(&self.weights) {
            let (start, end) = (rows.start.max(part.rows.start), rows.end.min(part.rows.end));
            if start < end {
                pairs += weight * f64::from(end - start) / f64::from(rows.end - rows.start);
            }
        }
        pairs * heads
    }

    /// Seconds of the owner for so much of the call beside messages of `bytes`.
    fn own_s(&self, owner: &OwnerSpeed, weight: f64, bytes: u64) -> f64 {
        let steps = if weight > 0.0 { owner.device.step_s } else { 0.0 };
        weight / owner.device.pairs_per_s + steps + float(bytes) / owner.copies_bytes_per_s
    }

    /// The shares with which the call ends first; without any where helpers do not pay.
    pub fn forecast(&self, owner: &OwnerSpeed, helpers: &[HelperSpeed]) -> Forecast {
        let again = if self.gradients { GRADIENT_AGAIN } else { 1.0 };
        // Who computes gradients alone need not compute the output again.
        let alone_s = (self.pairs() / owner.alone_pairs_per_s + owner.device.step_s) / again;
        let alone =
            Forecast { own: self.parts(0..self.slots()), shares: Vec::new(), total_s: alone_s, alone_s };
        if !self.can_travel || self.slots() == 0 {
            return alone;
        }
        let (mut low, mut high, mut best) = (0.0, alone_s, None);
        // To a thousandth of the time alone.
        for _ in 0..SEARCHES {
            let target = f64::midpoint(low, high);
            match self.within(owner, helpers, target) {
                Some(found) => {
                    high = target;
                    best = Some(found);
                }
                None => low = target,
            }
        }
        match best {
            Some((own, shares)) if !shares.is_empty() => {
                let bytes = shares.iter().map(|share| share.bytes[0] + share.bytes[1]).sum();
                let own_s = self.own_s(owner, self.weight(0..own), bytes);
                let total_s = shares.iter().map(|share| share.end_s).fold(own_s, f64::max);
                if total_s > alone_s * PAYS {
                    return alone;
                }
                Forecast { own: self.parts(0..own), shares, total_s, alone_s }
            }
            _ => alone,
        }
    }

    /// Shares with which all are ready at `target`, with the slots of the owner; if there are any.
    fn within(
        &self,
        owner: &OwnerSpeed,
        helpers: &[HelperSpeed],
        target: f64,
    ) -> Option<(usize, Vec<Share>)> {
        let mut left = self.slots();
        let mut shares = Vec::new();
        for (index, speed) in (0..).zip(helpers) {
            let fits = |count: usize| {
                let share = self.share(index, speed, left - count..left);
                share.filter(|share| share.end_s <= target)
            };
            // The most slots that fit: more take longer.
            let (mut most, mut found, mut beyond) = (0, None, left + 1);
            while beyond - most > 1 {
                let middle = usize::midpoint(most, beyond);
                match fits(middle) {
                    Some(share) => (most, found) = (middle, Some(share)),
                    None => beyond = middle,
                }
            }
            left -= most;
            shares.extend(found);
        }
        let bytes = shares.iter().map(|share| share.bytes[0] + share.bytes[1]).sum();
        (self.own_s(owner, self.weight(0..left), bytes) <= target).then_some((left, shares))
    }
}

/// Rows in at most `most` blocks of about the same length, none shorter than rows that fill
/// kernels. A short block would be computed by the kernels of decoding, whose sums have another
/// order.
fn cut(rows: Range<u32>, most: u32) -> Vec<Range<u32>> {
    let length = rows.end - rows.start;
    let count = most.min(length / LEAST_ROWS).max(1);
    let at = |block: u32| match block {
        block if block == count => rows.end,
        block => {
            let before = u64::from(length) * u64::from(block) / u64::from(count);
            rows.start + u32::try_from(before).unwrap_or(length) / ROWS * ROWS
        }
    };
    (0..count).map(|block| at(block)..at(block + 1)).collect()
}

#[expect(clippy::cast_precision_loss, reason = "bytes, to a few digits")]
fn float(bytes: u64) -> f64 {
    bytes as f64
}

/// Masks with longer names stay with the owner.
const MOST_MASK_BYTES: usize = 1 << 20;
/// So many blocks for each device make a share exact to some percents.
const SLOTS_PER_DEVICE: u32 = 12;
/// Blocks begin at multiples of it, as kernels take rows.
const ROWS: u32 = 64;
/// A piece with fewer rows has more keys than queries to send.
const LEAST_ROWS: u32 = 256;
/// In about how many pieces a share may be cut.
const COUNTS: [u32; 5] = [1, 2, 4, 8, 16];
/// Pieces that a helper takes ahead, the one that it computes among them.
pub(crate) const WINDOW: usize = 2;
/// A helper computes the output again and then gradients: seven products beside two.
const GRADIENT_WORK: f64 = 4.5;
/// Who computes gradients of a call has its output, or computes it again: this times as long.
pub(crate) const GRADIENT_AGAIN: f64 = GRADIENT_WORK / (GRADIENT_WORK - 1.0);
const SEARCHES: u32 = 12;
/// Helpers that save less are left out.
const PAYS: f64 = 0.95;

#[cfg(test)]
mod tests;
