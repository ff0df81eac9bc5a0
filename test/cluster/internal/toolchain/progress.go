package toolchain

import (
	"fmt"
	"io"
	"sync"
	"time"
)

// lockPoll is how often a build looks whether another one has finished.
const lockPoll = 200 * time.Millisecond

// Progress prints one line per event, each with the time since the start.
type Progress struct {
	mu    sync.Mutex
	out   io.Writer
	start time.Time
}

// NewProgress starts the clock. A nil writer discards the lines.
func NewProgress(out io.Writer) *Progress {
	if out == nil {
		out = io.Discard
	}
	return &Progress{out: out, start: time.Now()}
}

// Printf prints one line; the format needs no line end.
func (p *Progress) Printf(format string, args ...any) {
	p.mu.Lock()
	defer p.mu.Unlock()
	fmt.Fprintf(p.out, "[%6.1fs] %s\n", time.Since(p.start).Seconds(), fmt.Sprintf(format, args...))
}

// every prints what text returns at the given pace, until the returned function is called.
func (p *Progress) every(pace time.Duration, text func() string) (stop func()) {
	ticker := time.NewTicker(pace)
	stopped := make(chan struct{})
	var printing sync.WaitGroup
	printing.Go(func() {
		for {
			select {
			case <-ticker.C:
				p.Printf("%s", text())
			case <-stopped:
				return
			}
		}
	})
	return func() {
		ticker.Stop()
		close(stopped)
		printing.Wait()
	}
}
