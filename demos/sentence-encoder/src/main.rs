//! Encodes texts on several processes and shows which of them are close to each other.
#![forbid(unsafe_code)]

use std::num::NonZeroU32;
use std::ops::Range;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use clap::Parser;
use kyklos::{Session, Split};
use kyklos_launch::{Assignment, Options};
use kyklos_transport::{Abort, AbortCause, Group, Progress, Transport};
use sentence_encoder::devices::DeviceName;
use sentence_encoder::model::{Encoder, ModelFolder};
use sentence_encoder::nearest::{by_cosine, largest_difference};
use sentence_encoder::ranks::{Encoded, encode, share_out};
use sentence_encoder::texts::Packed;
use sentence_encoder::{Error, Result, alone, processes};

/// The texts of the demonstration.
const TEXTS: &str = include_str!("../texts.txt");

/// Largest difference from one process that rounding explains.
const ROUNDING: f32 = 1e-5;

/// Longest wait for the other ranks at the end.
const LEAVE: Duration = Duration::from_secs(60);

/// Encodes texts with MiniLM, the tokens split over several processes, and shows which texts are close to each other.
#[derive(Debug, Parser)]
struct Arguments {
    /// Number of processes that this one starts [default: 2; under torchrun and others, theirs]
    #[arg(long, value_name = "N")]
    ranks: Option<NonZeroU32>,
    /// Tokens of the ranks in proportion [default: equal]
    #[arg(long, value_name = "W:W…", value_delimiter = ':')]
    shares: Vec<f64>,
    /// Devices on which the ranks attend: best, cpu, wgpu or wgpu:N; the last one repeats
    #[arg(long, value_name = "D,D…", value_delimiter = ',', default_value = "best")]
    devices: Vec<DeviceName>,
    /// File with one text in each line [default: the demonstration's own]
    #[arg(long, value_name = "F")]
    texts: Option<PathBuf>,
    /// Orders the texts by their distance from this one
    #[arg(long, value_name = "TEXT")]
    query: Option<String>,
    /// Folder with config.json, model.safetensors and tokenizer.json [default: what fetch-model.sh brings]
    #[arg(long, value_name = "FOLDER")]
    model: Option<PathBuf>,
    /// Print embeddings and neighbours as JSON
    #[arg(long)]
    json: bool,
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let (rank, result) = match Assignment::find(&Options::default()) {
        Ok(Some(assignment)) => (Some(assignment.rank), arguments.one_of_several(assignment)),
        Ok(None) => (None, arguments.all()),
        Err(error) => (None, Err(error.into())),
    };
    let Err(error) = result else { return ExitCode::SUCCESS };
    match rank {
        Some(rank) => eprintln!("rank {rank}: error: {error}"),
        None => eprintln!("error: {error}"),
    }
    ExitCode::from(error.exit_code())
}

impl Arguments {
    /// The process that a person starts: it starts the ranks, or is the only one.
    fn all(&self) -> Result<()> {
        let ranks = self.ranks.map_or(2, NonZeroU32::get);
        // What is wrong for every rank is said once.
        let packed = self.pack()?;
        share_out(&packed, ranks, &self.split(ranks)?)?;
        if ranks == 1 {
            let group = kyklos_launch::from_env()?;
            return self.rank(group);
        }
        let arguments: Vec<_> = std::env::args_os().skip(1).collect();
        processes::run(ranks, &arguments)
    }

    /// One of the processes, started by the function above or by any launcher.
    fn one_of_several(&self, assignment: Assignment) -> Result<()> {
        let size = assignment.size;
        if let Some(ranks) = self.ranks.filter(|ranks| ranks.get() != size) {
            return Err(Error::request(format!(
                "--ranks {ranks}, and the launcher starts {size} processes: leave --ranks out"
            )));
        }
        self.rank(assignment.join()?)
    }

    fn rank(&self, transport: Group) -> Result<()> {
        match self.prepare(&*transport) {
            Ok(prepared) => self.encode(transport, prepared),
            Err(error) => {
                // The other ranks end with this text.
                let cause = AbortCause::Failed(error.to_string());
                let progress = Progress::default();
                transport.abort(Abort { culprit: transport.rank(), cause, progress });
                // If they do not take it in time, they see that this rank has gone.
                let _ = pollster::block_on(transport.close(LEAVE));
                Err(error)
            }
        }
    }

    fn prepare(&self, transport: &dyn Transport) -> Result<Prepared> {
        let rank = transport.rank().0 as usize;
        let device = self.devices.get(rank).or(self.devices.last()).copied().unwrap_or(DeviceName::Best);
        let (packed, size) = (self.pack()?, transport.size());
        let tokens = share_out(&packed, size, &self.split(size)?)?.swap_remove(rank);
        let (encoder, device) = (Encoder::read(&self.folder())?, device.open()?);
        let Range { start, end } = tokens;
        eprintln!("rank {rank}: tokens {start}..{end} of {} on {}", packed.tokens(), device.info().name);
        Ok(Prepared { packed, tokens, encoder, device })
    }

    fn encode(&self, transport: Group, prepared: Prepared) -> Result<()> {
        let Prepared { packed, tokens, encoder, device } = prepared;
        let (rank, size) = (transport.rank(), transport.size());
        let mut session = Session::new(transport, device);
        let start = Instant::now();
        let Encoded { embeddings, bytes_sent } = encode(&mut session, &encoder, &packed, tokens)?;
        let seconds = start.elapsed().as_secs_f64();
        eprintln!("rank {rank}: {bytes_sent} bytes sent, {seconds:.2} s");
        session.close(LEAVE)?;
        if rank.0 == 0 { self.show(&encoder, &packed, &embeddings, size) } else { Ok(()) }
    }

    /// Compares the embeddings with those of one process, and shows which texts are close.
    fn show(&self, encoder: &Encoder, packed: &Packed, embeddings: &[Vec<f32>], size: u32) -> Result<()> {
        let difference = largest_difference(embeddings, &alone::encode(encoder, packed)?);
        let texts = self.texts()?;
        let neighbours: Vec<(usize, f32)> = match &self.query {
            Some(_) => {
                let query = texts.len() - 1;
                by_cosine(&embeddings[query], embeddings, Some(query))
            }
            None => {
                let nearest =
                    |index: usize| by_cosine(&embeddings[index], embeddings, Some(index)).into_iter().next();
                (0..texts.len()).filter_map(nearest).collect()
            }
        };
        if self.json {
            let neighbours: Vec<_> = neighbours
                .iter()
                .map(|(index, cosine)| serde_json::json!({ "text": index, "cosine": cosine }))
                .collect();
            let report = serde_json::json!({
                "ranks": size,
                "tokens": packed.tokens(),
                "largest_difference": difference,
                "neighbours": neighbours,
                "embeddings": embeddings,
            });
            println!("{report}");
        } else {
            println!("{} texts, {} tokens, {size} processes\n", texts.len(), packed.tokens());
            match &self.query {
                Some(query) => println!("cosine with \"{query}\""),
                None => println!("cosine with the nearest text"),
            }
            for (position, (index, cosine)) in neighbours.iter().enumerate() {
                match &self.query {
                    Some(_) => println!("  {cosine:.3}  {}", texts[*index]),
                    None => println!("  {cosine:.3}  {}\n         {}", texts[position], texts[*index]),
                }
            }
            println!("\nlargest difference from one process with candle's own attention: {difference:.1e}");
        }
        // Not a number is no rounding either.
        if difference <= ROUNDING {
            return Ok(());
        }
        Err(Error::Wrong { difference, allowed: ROUNDING })
    }

    fn folder(&self) -> ModelFolder {
        self.model.clone().map_or_else(ModelFolder::fetched, ModelFolder)
    }

    fn pack(&self) -> Result<Packed> {
        Packed::new(&self.folder(), &self.texts()?)
    }

    /// The texts, the query behind them.
    fn texts(&self) -> Result<Vec<String>> {
        let lines = match &self.texts {
            Some(file) => std::fs::read_to_string(file).map_err(Error::system(file.display().to_string()))?,
            None => TEXTS.to_owned(),
        };
        let lines = lines.lines().map(str::trim).filter(|line| !line.is_empty());
        let texts: Vec<String> = lines.map(str::to_owned).chain(self.query.clone()).collect();
        match texts.len() {
            0 | 1 => Err(Error::request(format!("{} texts: give two, or one and --query", texts.len()))),
            _ => Ok(texts),
        }
    }

    fn split(&self, ranks: u32) -> Result<Split> {
        match self.shares.len() {
            0 => Ok(Split::Even),
            shares if shares == ranks as usize => Ok(Split::Weights(self.shares.clone())),
            shares => Err(Error::request(format!(
                "{shares} shares for {ranks} processes: give one number for each process, joined by :"
            ))),
        }
    }
}

/// What a rank needs before it can take part.
struct Prepared {
    packed: Packed,
    tokens: Range<usize>,
    encoder: Encoder,
    device: kyklos::backend::Device,
}
