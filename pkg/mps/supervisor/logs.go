package supervisor

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"time"
)

const (
	// outputFile gets the standard output of the control daemon: with -f, its log and its servers'.
	outputFile = "control.log"
	// maxLog is the size from which a log file is emptied, once it has been read.
	maxLog = 4 << 20
	// maxLine and maxLines are how much of a log is passed on at a time; clients can make a daemon write as much as they like.
	maxLine  = 1 << 10
	maxLines = 100
	// logInterval is how often logs are looked at.
	logInterval = time.Second
	// maxWords is how much of the log is looked at to explain a failure, and maxReasons how many lines of it are told.
	maxWords   = 4 << 10
	maxReasons = 5
)

// routine are the lines that the control daemon writes about each command, of which this supervisor sends several a minute.
var routine = regexp.MustCompile(`(Accepting connection\.\.\.|NEW UI|UI closed|Cmd:get_\S+( \d+)?|Control +\d+\] (\d+(\.\d+|[MG])|No default pinned memory limit set for the device!)?)$`)

// allLines is how much of all logs together is passed on in a logInterval.
const allLines = 200

// ration keeps what clients make their daemons say from filling the supervisor's log.
type ration struct {
	mu    sync.Mutex
	since time.Time
	said  int
}

// allow says whether a line may be passed on now, and how many were not since one was.
func (r *ration) allow(now time.Time) (ok bool, kept int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if now.Sub(r.since) >= logInterval {
		kept = max(0, r.said-allLines)
		r.since, r.said = now, 0
	}
	r.said++
	return r.said <= allLines, kept
}

// openOutput opens the file for a control daemon's output. Appending is what lets the file be emptied under it.
func openOutput(dir string) (*os.File, error) {
	f, err := os.OpenFile(filepath.Join(dir, outputFile), os.O_RDWR|os.O_CREATE|os.O_APPEND, 0o600)
	if err != nil {
		return nil, fmt.Errorf("open the log of the control daemon: %w", err)
	}
	return f, nil
}

// lastWords are the last lines that say something, of those that were written to the file since it was that long.
func lastWords(f *os.File, since int64) string {
	info, err := f.Stat()
	if err != nil {
		return ""
	}
	from := max(since, info.Size()-maxWords)
	text := make([]byte, maxWords)
	n, _ := f.ReadAt(text, from)
	var reasons []string
	for line := range strings.Lines(string(text[:n])) {
		if line = strings.TrimSpace(line); line != "" && !routine.MatchString(line) {
			reasons = append(reasons, line)
		}
	}
	if len(reasons) == 0 {
		return ""
	}
	return ": " + strings.Join(reasons[max(0, len(reasons)-maxReasons):], "; ")
}

// follower passes on what is written to the logs of one daemon, and keeps them small.
type follower struct {
	dir   string
	read  map[string]int64
	lines func(file, line string)
}

// newFollower begins where the logs end: an earlier supervisor has passed on what is there.
func newFollower(dir string, lines func(file, line string)) *follower {
	f := &follower{dir: dir, read: map[string]int64{}, lines: lines}
	for _, path := range f.files() {
		if info, err := os.Lstat(path); err == nil {
			f.read[path] = info.Size()
		}
	}
	return f
}

// follow passes on new lines until the context ends, and then once more.
func (f *follower) follow(ctx context.Context) {
	ticker := time.NewTicker(logInterval)
	defer ticker.Stop()
	for ctx.Err() == nil {
		f.pass()
		select {
		case <-ctx.Done():
		case <-ticker.C:
		}
	}
	f.pass()
}

func (f *follower) files() []string {
	paths, _ := filepath.Glob(filepath.Join(f.dir, "*.log")) // the pattern is good
	return paths
}

func (f *follower) pass() {
	for _, path := range f.files() {
		f.passFile(path)
	}
}

func (f *follower) passFile(path string) {
	info, err := os.Lstat(path)
	if err != nil || !info.Mode().IsRegular() {
		return
	}
	file, err := os.Open(path)
	if err != nil {
		return
	}
	defer func() { _ = file.Close() }()
	name := filepath.Base(path)
	if info.Size() < f.read[path] {
		f.read[path] = 0 // It was emptied.
	}
	data, err := io.ReadAll(io.LimitReader(io.NewSectionReader(file, f.read[path], maxLog), maxLog))
	if err != nil {
		return
	}
	whole := bytes.LastIndexByte(data, '\n') + 1
	if whole == 0 && len(data) >= maxLine {
		whole = len(data)
	}
	f.read[path] += int64(whole)
	f.passLines(name, data[:whole])
	if f.read[path] >= maxLog {
		if os.Truncate(path, 0) == nil {
			f.read[path] = 0
		}
	}
}

func (f *follower) passLines(name string, data []byte) {
	count := 0
	for line := range bytes.Lines(data) {
		line = bytes.TrimSpace(line)
		if len(line) == 0 {
			continue
		}
		if count++; count <= maxLines {
			f.lines(name, string(line[:min(len(line), maxLine)]))
		}
	}
	if count > maxLines {
		f.lines(name, fmt.Sprintf("(%d further lines: they are in the file, or were)", count-maxLines))
	}
}

// explain adds what the daemon said last to why it failed.
func explain(err error, p *process, output *os.File, since int64, multi bool) error {
	words := lastWords(output, since)
	if !errors.Is(err, errEnded) {
		return fmt.Errorf("%w%s", err, words)
	}
	if multi && strings.Contains(words, noDaemon) {
		return fmt.Errorf("this node's NVIDIA driver has no MPS for several users (%s knows no %s): upgrade the driver to 555 or later; strategy MPS, but not a fraction, can do without multiUser", controlProgram, multiUser)
	}
	return fmt.Errorf("%w (%s)%s", err, p.how, words)
}
