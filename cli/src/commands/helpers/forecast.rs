//! `kyklos helpers forecast`.

use std::sync::Arc;

use clap::{Args, ValueEnum};
use kyklos::backend::{Backend, Device};
use kyklos::plan::{bytes, table};
use kyklos::{AttentionProblem, Dtype, Mask, SystemClock, WireFormat};
use kyklos_helpers::{Call, Cuts, DeviceSpeed, HelperSpeed, LinkSpeed, OwnerSpeed, Shape};
use serde::Serialize;

use super::models::{HEAD_DIM, MODELS, Model};
use crate::devices::{self, BackendKind, DeviceRequest};
use crate::failure::{Failure, Result, note, print, print_json};

#[derive(Debug, Args)]
pub(super) struct ForecastArgs {
    #[arg(
        long,
        value_name = "D",
        default_value = "auto",
        help = format!("The owner's device, which is measured: {}", devices::names())
    )]
    device: DeviceRequest,
    /// Instead of a measurement: (query, key) pairs of all heads that the owner's device attends to
    /// in a second, as another run of this command printed it
    #[arg(long, value_name = "N", value_parser = positive)]
    pairs_per_s: Option<f64>,
    /// Speed of the helper's device over the owner's
    #[arg(long, value_name = "RATIO", default_value = "1", value_parser = positive)]
    helper_speed: f64,
    /// Link between the two machines; pcie: both devices in one machine
    #[arg(long, value_enum, default_value = "all")]
    link: LinkName,
    /// Number format of q, k, v and o on the link: same (exact), f16 (for f32 tensors) or int8
    /// (with scales; rounded once)
    #[arg(long, value_name = "NAME", default_value = "same")]
    wire: WireFormat,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum LinkName {
    All,
    Pcie,
    #[value(name = "10gbe")]
    Gbe10,
    #[value(name = "2.5gbe")]
    Gbe2p5,
    #[value(name = "1gbe")]
    Gbe1,
}

/// A link as it is in the table.
#[derive(Clone, Copy, Debug)]
struct Link {
    name: LinkName,
    text: &'static str,
    bytes_per_s: f64,
    hop_s: f64,
}

/// Nine tenths of what a network card says; between two devices of a machine what a copy through
/// host memory gives.
const LINKS: [Link; 4] = [
    Link { name: LinkName::Pcie, text: "PCIe", bytes_per_s: 6e9, hop_s: 3e-5 },
    Link { name: LinkName::Gbe10, text: "10 GbE", bytes_per_s: 1.125e9, hop_s: 1e-4 },
    Link { name: LinkName::Gbe2p5, text: "2.5 GbE", bytes_per_s: 2.8e8, hop_s: 1e-4 },
    Link { name: LinkName::Gbe1, text: "1 GbE", bytes_per_s: 1.125e8, hop_s: 1e-4 },
];

/// Of the owner's tensors to messages and back.
const COPIES_BYTES_PER_S: f64 = 4e9;

fn positive(text: &str) -> Result<f64, String> {
    let number: f64 = text.parse().map_err(|_| format!("`{text}` is not a number"))?;
    (number.is_finite() && number > 0.0).then_some(number).ok_or_else(|| "use a number above 0".to_owned())
}

/// What is known of the owner's device.
#[derive(Clone, Copy, Debug)]
struct Measured {
    dtype: Dtype,
    speed: DeviceSpeed,
}

#[derive(Debug, Serialize)]
struct Report {
    device: String,
    dtype: String,
    pairs_per_s: f64,
    helper_speed: f64,
    wire: String,
    rows: Vec<Row>,
}

#[derive(Debug, Serialize)]
struct Row {
    model: &'static str,
    size: &'static str,
    tokens: u32,
    heads: u32,
    layers: u32,
    /// Attention's part of a step.
    attention_part: f64,
    /// Attention of a step, alone.
    alone_s: f64,
    helped: Vec<Helped>,
}

/// With a helper behind a link.
#[derive(Debug, Serialize)]
struct Helped {
    link: &'static str,
    /// Whether the helper gets a share at all.
    pays: bool,
    helper_share: f64,
    /// Attention of a step.
    attention_s: f64,
    attention_gain: f64,
    step_gain: f64,
    /// Bytes of a step, both ways.
    bytes: u64,
}

pub(super) fn forecast(args: &ForecastArgs) -> Result<()> {
    let (device, measured) = match args.pairs_per_s {
        Some(pairs_per_s) => {
            let speed = DeviceSpeed { pairs_per_s, step_s: 0.0 };
            ("not measured".to_owned(), Measured { dtype: Dtype::Bf16, speed })
        }
        None => measure(args.device)?,
    };
    let links: Vec<Link> =
        LINKS.into_iter().filter(|link| [LinkName::All, link.name].contains(&args.link)).collect();
    let rows = MODELS.iter().map(|model| row(model, &measured, args, &links)).collect::<Result<Vec<_>>>()?;
    let report = Report {
        device,
        dtype: measured.dtype.to_string(),
        pairs_per_s: measured.speed.pairs_per_s,
        helper_speed: args.helper_speed,
        wire: args.wire.to_string(),
        rows,
    };
    if args.json { print_json(&report) } else { print(&text(&report, &links)) }
}

/// The speed of a device of this machine, in the smallest type that it has.
fn measure(request: DeviceRequest) -> Result<(String, Measured)> {
    if matches!(request, DeviceRequest::Of(BackendKind::Tab, _)) {
        return Err(devices::let_in_nowhere());
    }
    let device = devices::choose(&[request], 0)?.open()?;
    let name = device.info().name.clone();
    note(&format!("measuring {name}"));
    let dtypes = [Dtype::Bf16, Dtype::F16, Dtype::F32];
    let dtype = dtypes.into_iter().find(|dtype| device.supports(*dtype, HEAD_DIM as usize).is_ok());
    let dtype = dtype.ok_or_else(|| {
        Failure::request(format!("{name} has no attention for heads of {HEAD_DIM}"), "choose another device")
    })?;
    Ok((name, Measured { dtype, speed: speed(&device, dtype)? }))
}

fn speed(device: &Device, dtype: Dtype) -> Result<DeviceSpeed> {
    let problem = AttentionProblem::new([1, 256, HEADS, HEADS, HEAD_DIM], dtype, Mask::full())?;
    let capacity = pollster::block_on(device.measure(&problem, Arc::new(SystemClock::new())))?;
    #[expect(clippy::cast_precision_loss, reason = "speeds, to a few digits")]
    Ok(DeviceSpeed { pairs_per_s: capacity.pairs_per_s as f64, step_s: capacity.step_ns as f64 / 1e9 })
}

fn row(model: &Model, measured: &Measured, args: &ForecastArgs, links: &[Link]) -> Result<Row> {
    let &Model { name, size, tokens, layers, heads, .. } = model;
    let shape = Shape {
        batch: 1,
        q_len: tokens,
        kv_len: tokens,
        q_heads: heads,
        kv_heads: heads,
        head_dim: HEAD_DIM,
        dtype: measured.dtype,
    };
    let cuts = Cuts::new(&Call { wire: args.wire, ..Call::default() }, &shape, 1)?;
    let owner = OwnerSpeed {
        device: measured.speed,
        alone_pairs_per_s: measured.speed.pairs_per_s,
        copies_bytes_per_s: COPIES_BYTES_PER_S,
    };
    let part = model.attention_part();
    let layers_of = f64::from(layers);
    let helped = links.iter().map(|link| {
        let speed =
            DeviceSpeed { pairs_per_s: measured.speed.pairs_per_s * args.helper_speed, ..measured.speed };
        let link_speed = LinkSpeed {
            up_bytes_per_s: link.bytes_per_s,
            down_bytes_per_s: link.bytes_per_s,
            hop_s: link.hop_s,
        };
        let helper = HelperSpeed { device: speed, link: link_speed, memory_bytes: None, slowness: 1.0 };
        let forecast = cuts.forecast(&owner, &[helper]);
        let gain = forecast.gain();
        Helped {
            link: link.text,
            pays: !forecast.shares.is_empty(),
            helper_share: forecast.shares.iter().map(|share| share.fraction).sum(),
            attention_s: forecast.total_s * layers_of,
            attention_gain: gain,
            step_gain: 1.0 / (1.0 - part + part / gain),
            bytes: forecast.shares.iter().map(|share| share.bytes[0] + share.bytes[1]).sum::<u64>()
                * u64::from(layers),
        }
    });
    let helped: Vec<Helped> = helped.collect();
    let alone_s = cuts.forecast(&owner, &[]).alone_s * layers_of;
    Ok(Row { model: name, size, tokens, heads, layers, attention_part: part, alone_s, helped })
}

/// The report for people: a table of gains, or all of one link.
fn text(report: &Report, links: &[Link]) -> String {
    let mut header = vec!["model", "size", "of a step", "alone"];
    match links {
        [_] => header.extend(["with a helper", "faster", "whole step", "helper's share", "bytes"]),
        _ => header.extend(links.iter().map(|link| link.text)),
    }
    let rows = report.rows.iter().map(|row| {
        let mut cells = vec![
            row.model.to_owned(),
            row.size.to_owned(),
            format!("{:.0} %", row.attention_part * 100.0),
            seconds(row.alone_s),
        ];
        match &row.helped[..] {
            [one] => cells.extend(one.cells()),
            all => cells.extend(all.iter().map(Helped::gains)),
        }
        cells
    });
    let mut out = table(&header, rows.collect());
    let Report { device, dtype, pairs_per_s, helper_speed, wire, .. } = report;
    let columns = match links {
        [link] => format!(
            "Over {}, for a step: seconds of attention with one helper, how many times faster attention is, and the whole step,\n\
             what part of attention the helper computes, and the bytes to it and back.",
            link.text
        ),
        _ => "For each link: how many times faster attention is with one helper, and in brackets the whole step.".to_owned(),
    };
    out.push_str(&format!(
        "\nthis device: {device}, {dtype}, {pairs_per_s:.3e} pairs/s; the helper's: {helper_speed} x as fast; numbers on the \
         link: {wire}\n\
         of a step: attention's part of one pass of the model. alone: seconds of attention in it, without a helper.\n\
         {columns}\n\
         Predicted from the speed of devices and links; the rest of a step is taken to run as fast as attention.\n"
    ));
    out
}

impl Helped {
    fn gains(&self) -> String {
        if !self.pays {
            return NOT_WORTH_IT.to_owned();
        }
        format!("{:.2} x ({:.2} x)", self.attention_gain, self.step_gain)
    }

    fn cells(&self) -> Vec<String> {
        if !self.pays {
            return [NOT_WORTH_IT, "", "", "", ""].map(str::to_owned).to_vec();
        }
        vec![
            seconds(self.attention_s),
            format!("{:.2} x", self.attention_gain),
            format!("{:.2} x", self.step_gain),
            format!("{:.0} %", self.helper_share * 100.0),
            bytes(self.bytes),
        ]
    }
}

/// Without a share for the helper the call ends sooner.
const NOT_WORTH_IT: &str = "not worth it";

fn seconds(seconds: f64) -> String {
    match seconds {
        0.0..0.01 => format!("{:.2} ms", seconds * 1e3),
        0.01..1.0 => format!("{:.0} ms", seconds * 1e3),
        1.0..100.0 => format!("{seconds:.1} s"),
        _ => format!("{seconds:.0} s"),
    }
}

/// Enough to keep every device busy.
const HEADS: u32 = 8;

#[cfg(test)]
mod tests {
    use super::*;

    fn report(pairs_per_s: f64, helper_speed: f64, wire: WireFormat) -> Report {
        let measured = Measured { dtype: Dtype::Bf16, speed: DeviceSpeed { pairs_per_s, step_s: 1e-5 } };
        let args = ForecastArgs {
            device: DeviceRequest::Auto,
            pairs_per_s: None,
            helper_speed,
            link: LinkName::All,
            wire,
            json: false,
        };
        let rows = MODELS.iter().map(|model| row(model, &measured, &args, &LINKS).unwrap()).collect();
        Report {
            device: String::new(),
            dtype: "bf16".to_owned(),
            pairs_per_s,
            helper_speed,
            wire: wire.to_string(),
            rows,
        }
    }

    #[test]
    fn faster_links_and_helpers_help_more_and_never_make_it_slower() {
        // 40 TFLOP/s: 4 x 128 operations for each pair.
        let slow = report(8e10, 0.5, WireFormat::Same);
        let equal = report(8e10, 1.0, WireFormat::Same);
        for (row, slower) in equal.rows.iter().zip(&slow.rows) {
            let gains: Vec<f64> = row.helped.iter().map(|helped| helped.step_gain).collect();
            assert!(gains.is_sorted_by(|a, b| a >= b) && gains.iter().all(|gain| *gain >= 1.0), "{row:?}");
            for (helped, less) in row.helped.iter().zip(&slower.helped) {
                assert!(helped.attention_gain >= less.attention_gain - 0.02, "{row:?}");
                assert_eq!(helped.pays, helped.attention_gain > 1.0);
                assert!(helped.step_gain <= helped.attention_gain && helped.attention_gain < 2.0);
            }
        }
        // Wan at 720p over PCIe gains; Flux at 1024 x 1024 over 1 GbE stays alone.
        assert!(equal.rows[0].helped[0].attention_gain > 1.7, "{:?}", equal.rows[0]);
        assert!(!equal.rows.last().unwrap().helped[3].pays);
    }

    #[test]
    fn fewer_bytes_make_slow_links_worth_more() {
        let [same, int8] = [WireFormat::Same, WireFormat::Int8].map(|wire| report(8e10, 1.0, wire));
        assert!(int8.rows[0].helped[2].attention_gain > same.rows[0].helped[2].attention_gain);
    }

    #[test]
    fn the_table_says_what_does_not_pay() {
        let text = text(&report(8e10, 1.0, WireFormat::Same), &LINKS);
        assert!(
            text.lines().any(|line| line.starts_with("Flux.1") && line.ends_with(NOT_WORTH_IT)),
            "{text}"
        );
        assert!(positive("0").is_err() && positive("-1").is_err() && positive("x").is_err());
    }
}
