//! Conversion of elements: between storage types, and to 8-bit codes and back.

use kyklos::backend::{Elements, Scales};
use kyklos::{Dtype, Error, Result, TOKENS_PER_SCALE};

use super::arguments::to_u32;
use crate::device::{CudaBuffer, LaunchConfig, OpenDevice};
use crate::kernels::{
    CodesArguments, CodesKernel, ConvertArguments, Direction, SMALL_THREADS, convert_kernel,
};

pub(crate) fn convert(
    device: &OpenDevice,
    from: Elements<&CudaBuffer>,
    into: Elements<&mut CudaBuffer>,
    shape: [usize; 4],
    overflow: Option<&mut CudaBuffer>,
) -> Result<()> {
    match (from, into) {
        (
            Elements::Stored { buffer, first, dtype },
            Elements::Stored { buffer: into, first: into_first, dtype: into_dtype },
        ) => {
            let into = Stored { buffer: into, first: into_first, dtype: into_dtype };
            store(device, &Stored { buffer, first, dtype }, &into, shape.iter().product(), overflow)
        }
        (Elements::Stored { buffer, first, dtype }, Elements::Coded { codes, scales, of }) => {
            let coded = Coded { codes, scales, of };
            code(device, Direction::ToCodes, &Stored { buffer, first, dtype }, &coded, shape)
        }
        (Elements::Coded { codes, scales, of }, Elements::Stored { buffer, first, dtype }) => {
            let coded = Coded { codes, scales, of };
            code(device, Direction::FromCodes, &Stored { buffer, first, dtype }, &coded, shape)
        }
        (Elements::Coded { .. }, Elements::Coded { .. }) => {
            unreachable!("plans convert to codes and back, not from codes to codes")
        }
    }
}

/// [`Elements::Stored`], as source or destination.
struct Stored<'a> {
    buffer: &'a CudaBuffer,
    first: usize,
    dtype: Dtype,
}

impl Stored<'_> {
    /// The address of the first element, for kernels that access `elements` of them.
    fn address(&self, elements: usize) -> Result<u64> {
        let Self { buffer, first, dtype } = self;
        if !first.is_multiple_of(8) {
            return Err(Error::request(
                format!("a conversion from or to element {first} on, kernels take eight at a time"),
                "begin at a multiple of 8",
            ));
        }
        fits("elements", buffer, (first + elements) * dtype.bytes())?;
        Ok(buffer.address() + (first * dtype.bytes()) as u64)
    }
}

/// [`Elements::Coded`], as source or destination.
struct Coded<'a> {
    codes: &'a CudaBuffer,
    scales: &'a CudaBuffer,
    of: Scales,
}

/// Refuses an access behind the end of a buffer: kernels do not check it, and an illegal access
/// destroys the context.
fn fits(what: &str, buffer: &CudaBuffer, bytes: usize) -> Result<()> {
    if bytes <= buffer.bytes() {
        return Ok(());
    }
    Err(Error::request(
        format!("a conversion of {bytes} bytes of {what} in a buffer of {}", buffer.bytes()),
        "convert what the buffers hold",
    ))
}

/// Converts between storage types.
fn store(
    device: &OpenDevice,
    from: &Stored<'_>,
    into: &Stored<'_>,
    elements: usize,
    overflow: Option<&mut CudaBuffer>,
) -> Result<()> {
    let kernel =
        convert_kernel(from.dtype, into.dtype).filter(|_| elements.is_multiple_of(8)).ok_or_else(|| {
            Error::request(
                format!("no kernel converts {elements} elements of {} to {}", from.dtype, into.dtype),
                "convert a multiple of 8 between f32 and a type of 16 bits",
            )
        })?;
    let eights = elements / 8;
    let arguments = ConvertArguments {
        from: from.address(elements)?,
        into: into.address(elements)?,
        eights: eights as u64,
        overflow: overflow.as_ref().map_or(0, |word| word.address()),
    };
    if let Some(word) = &overflow {
        fits("a report", word, size_of::<u32>())?;
    }
    let blocks = eights.div_ceil(SMALL_THREADS as usize);
    let writes: Vec<&CudaBuffer> = [into.buffer].into_iter().chain(overflow.as_deref()).collect();
    launch(device, (&kernel, blocks, 0), &arguments, &[from.buffer], &writes)
}

/// Converts to codes or from them.
fn code(
    device: &OpenDevice,
    direction: Direction,
    stored: &Stored<'_>,
    coded: &Coded<'_>,
    shape: [usize; 4],
) -> Result<()> {
    let [batch, tokens, heads, dim] = shape;
    let kernel = CodesKernel::of(direction, coded.of, stored.dtype, shape).ok_or_else(|| {
        Error::request(format!("no kernel makes codes of heads of {dim}"), "use a multiple of 8 up to 256")
    })?;
    let elements = shape.iter().product();
    let scales = match coded.of {
        Scales::Rows => batch * tokens * heads,
        Scales::Channels => batch * tokens.div_ceil(TOKENS_PER_SCALE) * heads * dim,
    };
    fits("codes", coded.codes, elements)?;
    fits("scales", coded.scales, scales * 4)?;
    let arguments = CodesArguments {
        data: stored.address(elements)?,
        codes: coded.codes.address(),
        scales: coded.scales.address(),
        batch: to_u32("the batch", batch)?,
        tokens: to_u32("the number of tokens", tokens)?,
        heads: to_u32("the number of heads", heads)?,
        dim: to_u32("the head dim", dim)?,
        lanes: kernel.lanes,
        reserved: 0,
    };
    let (data, codes) = ([stored.buffer], [coded.codes, coded.scales]);
    let (reads, writes): (&[_], &[_]) = match direction {
        Direction::ToCodes => (&data, &codes),
        Direction::FromCodes => (&codes, &data),
    };
    launch(device, (&kernel.name, kernel.blocks, kernel.shared_bytes), &arguments, reads, writes)
}

fn launch(
    device: &OpenDevice,
    (kernel, blocks, shared_bytes): (&str, usize, u32),
    arguments: &impl bytemuck::Pod,
    reads: &[&CudaBuffer],
    writes: &[&CudaBuffer],
) -> Result<()> {
    // An empty grid is an error.
    if blocks == 0 {
        return Ok(());
    }
    let grid = [to_u32("the number of blocks", blocks)?, 1, 1];
    device.launch(
        LaunchConfig { kernel, grid, threads: SMALL_THREADS, shared_bytes },
        arguments,
        reads,
        writes,
    )?;
    Ok(())
}
