package toolchain

import (
	"fmt"
	"io"
	"sync"
	"time"
)

// lockPoll is how long a build waits before it looks again whether another build of the same
// artifact has finished.
const lockPoll = 200 * time.Millisecond

// Progress prints one line per event. Each line starts with the time since NewProgress.
type Progress struct {
	mu    sync.Mutex
	out   io.Writer
	start time.Time
}

// NewProgress returns a Progress whose lines show the time since this call. If out is nil, it
// discards the lines.
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

// every prints the result of text() once in each period of length pace, until the caller calls
// stop.
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
