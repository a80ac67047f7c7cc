//! Conversion to int8 codes and back, compared with the definition.

use bytes::Bytes;
use kyklos::Dtype;
use kyklos::backend::{Backend, DeviceClass, Elements, Scales};
use kyklos_oracle::inputs::{TensorId, normal};
use kyklos_oracle::wire::{TOGETHER, load, scale_of, store};

use crate::oracle_dtype;

/// The shapes cover a second batch entry that begins inside a block, a short last block, and
/// several heads.
const SHAPES: [[usize; 4]; 3] = [[2, 150, 3, 24], [1, 64, 1, 8], [3, 7, 2, 72]];

/// First element of the tensor in the source buffer, and in the buffer of the converted tensor.
const FIRST: usize = 40;

pub(super) async fn codes<B: Backend>(backend: &B, who: &str) {
    // A software driver needs a second to compile a kernel.
    let few = backend.info().class == DeviceClass::SoftwareGpu;
    for dtype in Dtype::ALL {
        for shape in SHAPES.into_iter().take(if few && dtype != Dtype::F32 { 1 } else { SHAPES.len() }) {
            for of in [Scales::Channels, Scales::Rows] {
                there_and_back(backend, &format!("{who} {dtype} {shape:?} {of:?}"), dtype, shape, of).await;
            }
        }
    }
}

async fn there_and_back<B: Backend>(backend: &B, who: &str, dtype: Dtype, shape: [usize; 4], of: Scales) {
    let (groups, bytes) = (groups(shape, of), dtype.bytes());
    let stored_as = oracle_dtype(dtype);
    let elements: usize = shape.iter().product();
    let numbers = load(stored_as, &store(stored_as, &numbers(&groups, elements)));
    let mut stored = store(stored_as, &[9.0; FIRST]);
    stored.extend(store(stored_as, &numbers));
    let source = backend.upload("numbers", Bytes::from(stored)).unwrap();
    let poison = |bytes: usize| backend.upload("poison", Bytes::from(vec![0xa5; bytes])).unwrap();
    let (mut codes, mut scales) = (poison(elements + 16), poison(groups.len() * 4 + 16));
    let from = Elements::Stored { buffer: &source, first: FIRST, dtype };
    backend
        .convert(from, Elements::Coded { codes: &mut codes, scales: &mut scales, of }, shape, None)
        .unwrap();
    let coded = backend.download(&mut codes, 0..elements + 16).await.unwrap();
    let scale_bytes = backend.download(&mut scales, 0..groups.len() * 4 + 16).await.unwrap();
    assert!(coded[elements..].iter().all(|byte| *byte == 0xa5), "{who}: more codes than were asked");
    assert!(scale_bytes[groups.len() * 4..].iter().all(|byte| *byte == 0xa5), "{who}: more scales");
    let scale: Vec<f32> = bytemuck::pod_collect_to_vec(&scale_bytes[..groups.len() * 4]);

    let mut back = poison((FIRST + elements) * bytes);
    let into = Elements::Stored { buffer: &mut back, first: FIRST, dtype };
    backend.convert(Elements::Coded { codes: &codes, scales: &scales, of }, into, shape, None).unwrap();
    let back = backend.download(&mut back, 0..(FIRST + elements) * bytes).await.unwrap();
    assert!(back[..FIRST * bytes].iter().all(|byte| *byte == 0xa5), "{who}: before the tensor");
    let back = load(stored_as, &back[FIRST * bytes..]);

    for (group, places) in groups.iter().enumerate() {
        let (scale, exact) = (scale[group], scale_of(places.iter().map(|place| numbers[*place])));
        assert!((f64::from(scale) - exact).abs() <= 4e-7 * exact, "{who}: scale {scale} for {exact}");
        for place in places {
            let (x, code) = (numbers[*place], coded[*place].cast_signed());
            let y = back[*place];
            if !x.is_finite() {
                assert!(code == i8::MIN && y.is_nan(), "{who}: {x} as {code}, back as {y}");
                continue;
            }
            assert!(code != i8::MIN, "{who}: {x} as what is not finite");
            let decoded = f64::from(code) * f64::from(scale);
            let off = (f64::from(x) - decoded).abs();
            // If a scale would be subnormal, all its codes are 0.
            let floor = 127.0 * f64::from(f32::MIN_POSITIVE);
            assert!(off <= f64::from(scale) / 2.0 * 1.00001 || (scale == 0.0 && off <= floor), "{who}: {x}");
            let rounded = load(stored_as, &store(stored_as, &[f32::from(code) * scale]))[0];
            // Numbers that are subnormal in f16 may be flushed to zero.
            assert!(
                y == rounded || (dtype == Dtype::F16 && rounded.abs() < 6.2e-5 && y == 0.0),
                "{who}: code {code} of scale {scale} as {y}, not {rounded}"
            );
        }
    }
}

/// Places of the elements that share each scale, in the order of the scales.
fn groups([batch, tokens, heads, dim]: [usize; 4], of: Scales) -> Vec<Vec<usize>> {
    let at = |b: usize, token: usize, head: usize, channel: usize| {
        ((b * tokens + token) * heads + head) * dim + channel
    };
    let mut groups = Vec::new();
    for b in 0..batch {
        match of {
            Scales::Channels => {
                for first in (0..tokens).step_by(TOGETHER) {
                    for (head, channel) in (0..heads).flat_map(|head| (0..dim).map(move |c| (head, c))) {
                        let block = first..tokens.min(first + TOGETHER);
                        groups.push(block.map(|token| at(b, token, head, channel)).collect());
                    }
                }
            }
            Scales::Rows => {
                for (token, head) in (0..tokens).flat_map(|token| (0..heads).map(move |head| (token, head))) {
                    groups.push((0..dim).map(|channel| at(b, token, head, channel)).collect());
                }
            }
        }
    }
    groups
}

/// Numbers of a different magnitude in each group, some of them extreme.
fn numbers(groups: &[Vec<usize>], elements: usize) -> Vec<f32> {
    let mut numbers: Vec<f32> = (0..elements as u64).map(|i| normal(11, TensorId::K, i)).collect();
    for (group, places) in groups.iter().enumerate() {
        let size = 10.0_f32.powi(group as i32 % 5 - 2);
        places.iter().for_each(|place| numbers[*place] *= size);
        let first = places[0];
        match group {
            1 => places.iter().for_each(|place| numbers[*place] = 0.0),
            2 => numbers[first] = f32::NAN,
            3 => (numbers[first], numbers[places[1]]) = (f32::INFINITY, f32::NEG_INFINITY),
            4 => places.iter().for_each(|place| numbers[*place] = f32::NAN),
            // A step of exactly 1, and ties.
            5 => {
                numbers[first] = -127.0;
                (numbers[places[1]], numbers[places[2]], numbers[places[3]]) = (2.5, 3.5, -0.5);
            }
            6 => places.iter().for_each(|place| numbers[*place] = -0.0),
            7 => places.iter().for_each(|place| numbers[*place] *= 1e-39),
            8 => numbers[first] = 60000.0,
            9 => {
                places.iter().for_each(|place| numbers[*place] = 0.0);
                numbers[places[1]] = f32::NAN;
            }
            _ => {}
        }
    }
    numbers
}
