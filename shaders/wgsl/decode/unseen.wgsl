// l of a slot that saw no key of its split; no sum of weights is negative. Its m and O mean nothing.
const UNSEEN: f32 = -1.0f;
// By bits, so that NaN counts as seen.
fn is_unseen(l: f32) -> bool { return bitcast<u32>(l) == 0xbf800000u; }

