//! `sandboxer image`: the images that sandboxes start from.

use std::io::{self, Write};
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, Result};
use clap::Subcommand;
use indicatif::{HumanBytes, ProgressBar, ProgressStyle};
use sandboxer_image::{BaseOptions, ExtraAuthorities, Image, ImageName, ImageRef, ImageStore, Limits, Progress, Source, Update};
use sandboxer_protocol::agent::ImageSpares;

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    directory: ImageDir,
    #[command(flatten)]
    authorities: Authorities,

    /// Print JSON
    #[arg(long, global = true)]
    json: bool,

    #[command(subcommand)]
    command: Command,
}

/// Where images are. For every verb that needs one.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct ImageDir {
    /// Where images are kept, shared by all instances on this machine [default: ~/.local/share/sandboxer/images]
    #[arg(long, global = true, env = "SANDBOXER_IMAGE_DIR", value_name = "DIR")]
    image_dir: Option<PathBuf>,
}

/// Certificate authorities that sandboxes trust beside those of their image.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct Authorities {
    /// File of certificates (PEM) that programs in sandboxes trust too, such as a company's own; they are put into the images that are made
    #[arg(long, global = true, env = "SANDBOXER_EXTRA_CA_FILE", value_name = "FILE")]
    extra_ca_file: Option<PathBuf>,
}

impl Authorities {
    pub(crate) fn read(&self) -> sandboxer_image::Result<Option<ExtraAuthorities>> {
        let given = self.extra_ca_file.as_deref().filter(|path| !path.as_os_str().is_empty());
        given.map(ExtraAuthorities::read).transpose()
    }
}

impl ImageDir {
    pub(crate) fn path(&self) -> Result<PathBuf> {
        self.image_dir.clone().or_else(ImageStore::default_directory).context("HOME is not set: say where images are with --image-dir")
    }
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Build the base image from Debian packages, or do nothing if it is there and up to date
    Build {
        /// The release to take packages from [default: bookworm; on Ubuntu this machine's own]
        #[arg(long)]
        suite: Option<String>,
        /// A mirror's address or a whole `deb …` line; may be given several times [default: the mirror of this machine's apt]
        #[arg(long)]
        mirror: Vec<String>,
        /// Build it anew with the newest packages, even if it is there
        #[arg(long)]
        fresh: bool,
    },
    /// Make an image from an OCI layout directory or from the file that `docker save` wrote
    Import {
        /// The directory or file
        path: PathBuf,
        /// What to call it: 1 to 64 of A-Z a-z 0-9 . _ -
        #[arg(long)]
        name: ImageName,
        /// Interpreters of each language that wait in its sandboxes [default: as the server is set; where that is 0, none]
        #[arg(long, value_name = "N")]
        spare_interpreters: Option<u32>,
        /// Modules that a waiting Python of it has imported already, separated by commas [default: as the server is set]
        #[arg(long, value_delimiter = ',', value_name = "NAMES")]
        warm_modules: Option<Vec<String>>,
    },
    /// List images
    Ls,
    /// Remove a name, and the image with its last name; or an image by its digest
    Rm {
        /// The name or the digest
        image: ImageRef,
    },
    /// Read an image's file and check that it is undamaged
    Verify {
        /// The name or the digest
        image: ImageRef,
    },
}

pub(crate) fn run(args: Args) -> Result<ExitCode> {
    let store = ImageStore::open(args.directory.path()?)?.with_authorities(args.authorities.read()?);
    match args.command {
        Command::Build { suite, mirror, fresh } => {
            let bar = Bar::new();
            let image = store.build_base(&BaseOptions { suite, mirrors: mirror, fresh }, &bar)?;
            bar.finish();
            show_one(&image, args.json)?;
        }
        Command::Import { path, name, spare_interpreters, warm_modules } => {
            let warm_modules = warm_modules.map(|names| names.into_iter().filter(|name| !name.is_empty()).collect());
            let spares = ImageSpares { each: spare_interpreters, warm_modules };
            spares.check().map_err(anyhow::Error::msg)?;
            let said = if spares == ImageSpares::default() { None } else { Some(serde_json::to_string(&spares)?) };
            let bar = Bar::new();
            let (image, left_out) = store.import_with(&path, &name, Limits::default(), said.as_deref(), &bar)?;
            bar.finish();
            if left_out > 0 {
                eprintln!("left out {left_out} device nodes and named pipes; a sandbox has a /dev of its own");
            }
            show_one(&image, args.json)?;
        }
        Command::Ls => {
            let images = store.list()?;
            if args.json {
                print_json(&serde_json::json!({ "items": images }))?;
            } else {
                list(&images)?;
            }
        }
        Command::Rm { image } => {
            store.remove(&image)?;
            if args.json {
                print_json(&serde_json::json!({ "removed": image.to_string() }))?;
            }
        }
        Command::Verify { image } => show_one(&store.verify(&image)?, args.json)?,
    }
    Ok(ExitCode::SUCCESS)
}

fn show_one(image: &Image, json: bool) -> Result<()> {
    if json {
        return print_json(image);
    }
    let name = image.name.as_ref().map_or("-", ImageName::as_str);
    writeln!(io::stdout(), "{name} {} {}", image.digest, image.path.display()).context("can't write to standard output")
}

fn list(images: &[Image]) -> Result<()> {
    let mut out = io::stdout().lock();
    let mut line = |name: &str, digest: &str, size: &str, created: &str, source: &str| {
        writeln!(out, "{name:<20} {digest:<14} {size:>12}  {created:<20}  {source}").context("can't write to standard output")
    };
    line("NAME", "DIGEST", "SIZE", "CREATED", "FROM")?;
    for image in images {
        let name = image.name.as_ref().map_or("-", ImageName::as_str);
        let created = image.created_at.map(|time| format!("{time:.0}")).unwrap_or_default();
        let source = match &image.source {
            Some(Source::Built { suite, .. }) => format!("packages of {suite}"),
            Some(Source::Imported { from }) => from.display().to_string(),
            None => "an earlier build or import".to_owned(),
        };
        line(name, &image.digest.as_hex()[..12], &HumanBytes(image.size_bytes).to_string(), &created, &source)?;
    }
    Ok(())
}

fn print_json(value: &impl serde::Serialize) -> Result<()> {
    let text = serde_json::to_string_pretty(value)?;
    writeln!(io::stdout(), "{text}").context("can't write to standard output")
}

/// A progress bar on a terminal, one line a step elsewhere.
struct Bar(ProgressBar);

impl Bar {
    fn new() -> Self {
        let bar = ProgressBar::new(1000);
        // The template is ours; should it be wrong, the default one does.
        if let Ok(style) = ProgressStyle::with_template("{bar:30} {percent:>3}% {elapsed:>4} {msg}") {
            bar.set_style(style);
        }
        Self(bar)
    }

    fn finish(&self) {
        self.0.finish_and_clear();
    }
}

impl Progress for Bar {
    fn update(&self, update: Update<'_>) {
        if self.0.is_hidden() {
            eprintln!("{:>3}% {}", (update.fraction * 100.0) as u8, update.message);
        } else {
            self.0.set_position((update.fraction * 1000.0) as u64);
            self.0.set_message(update.message.to_owned());
            self.0.enable_steady_tick(std::time::Duration::from_millis(200));
        }
    }
}
