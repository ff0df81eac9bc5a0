package main

import (
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io/fs"
	"os"
	"os/signal"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvmlsim/cuda"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvmlsim/mps"
)

// Exit codes by which scripts tell outcomes apart.
const (
	exitDone        = 0
	exitUsage       = 1
	exitNotAttached = 2
	exitOutOfMemory = 3
	exitLost        = 4
)

// line is the JSON object that the program prints on one line for each event.
type line struct {
	Event string `json:"event"`
	// Mode says how the program uses the GPUs: through MPS (mps) or without it (direct).
	Mode    string       `json:"mode,omitempty"`
	Server  int          `json:"server,omitempty"`
	User    *int         `json:"user,omitempty"`
	Devices []mps.Device `json:"devices,omitempty"`
	Device  *int         `json:"device,omitempty"`
	MiB     uint64       `json:"mib,omitempty"`
	Error   string       `json:"error,omitempty"`
	Message string       `json:"message,omitempty"`
}

func say(l line) {
	text, err := json.Marshal(l)
	if err != nil {
		text = []byte(err.Error())
	}
	fmt.Println(string(text))
}

func sayError(event string, err error) {
	l := line{Event: event, Message: err.Error()}
	if known := new(cuda.Error); errors.As(err, &known) {
		l.Error, l.Message = known.Code.String(), known.Message
	}
	say(l)
}

type options struct {
	allocate string
	fill     bool
	hold     bool
	holdFor  time.Duration
	until    string
}

func run(args []string) int {
	var o options
	flags := flag.NewFlagSet(programName, flag.ContinueOnError)
	flags.StringVar(&o.allocate, "allocate", "", "MiB of memory to allocate: 1000 on the first device, or 0=1000,1=2000")
	flags.BoolVar(&o.fill, "fill", false, "allocate all free memory of the first device, and print how much that is")
	flags.BoolVar(&o.hold, "hold", false, "keep running until SIGTERM or SIGINT")
	flags.DurationVar(&o.holdFor, "hold-for", 0, "keep running for this time")
	flags.StringVar(&o.until, "until", "", "keep running until this file exists")
	if err := flags.Parse(args); err != nil || flags.NArg() > 0 {
		return exitUsage
	}
	wanted, err := parseAllocations(o.allocate)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return exitUsage
	}
	session, err := mps.Open(func() { say(line{Event: "pending"}) })
	if err != nil {
		sayError("failed", err)
		return exitNotAttached
	}
	user := os.Getuid()
	say(line{Event: "attached", Mode: session.Mode(), Server: session.Server, User: &user, Devices: session.Devices})
	for _, a := range wanted {
		if err := session.Allocate(a.device, a.mib); err != nil {
			sayError("failed", err)
			return exitOutOfMemory
		}
		say(line{Event: "allocated", Device: &a.device, MiB: a.mib})
	}
	if o.fill {
		say(line{Event: "filled", MiB: fill(session)})
	}
	return o.stay(session)
}

// fill allocates smaller and smaller pieces of the first device's memory until none is left. It
// returns the total in MiB.
func fill(session *mps.Session) uint64 {
	total := uint64(0)
	for piece := uint64(1 << 20); piece > 0; piece /= 2 {
		for session.Allocate(0, piece) == nil {
			total += piece
		}
	}
	return total
}

type wish struct {
	device int
	mib    uint64
}

func parseAllocations(text string) ([]wish, error) {
	if text == "" {
		return nil, nil
	}
	var all []wish
	for entry := range strings.SplitSeq(text, ",") {
		device, amount, named := strings.Cut(entry, "=")
		if !named {
			device, amount = "0", entry
		}
		number, errDevice := strconv.Atoi(device)
		mib, errAmount := strconv.ParseUint(amount, 10, 40)
		if errDevice != nil || errAmount != nil {
			return nil, fmt.Errorf("--allocate %q is not of the form 1000 or 0=1000,1=2000", text)
		}
		all = append(all, wish{number, mib})
	}
	return all, nil
}

// stay keeps the session open for the time that the options give, and returns the program's exit
// code. If the MPS server ends earlier, stay returns at once.
func (o options) stay(session *mps.Session) int {
	if !o.hold && o.holdFor == 0 && o.until == "" {
		return exitDone
	}
	lost := make(chan error, 1)
	go func() { lost <- session.Wait() }()
	signals := make(chan os.Signal, 1)
	signal.Notify(signals, syscall.SIGTERM, syscall.SIGINT)
	var end <-chan time.Time
	if o.holdFor > 0 {
		end = time.After(o.holdFor)
	}
	look := time.NewTicker(20 * time.Millisecond)
	defer look.Stop()
	say(line{Event: "holding"})
	for {
		select {
		case err := <-lost:
			sayError("lost", err)
			return exitLost
		case <-signals:
			return exitDone
		case <-end:
			return exitDone
		case <-look.C:
			if o.until == "" {
				continue
			}
			if _, err := os.Stat(o.until); !errors.Is(err, fs.ErrNotExist) {
				return exitDone
			}
		}
	}
}
