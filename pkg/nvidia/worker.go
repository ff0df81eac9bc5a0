package nvidia

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"time"
)

// seat is one card's place for a worker. Whoever holds the turn has the rest of it to himself.
type seat struct {
	idle  time.Duration
	start func() (*worker, error)
	turn  chan struct{}
	// worker is the last one that was started; it may have gone.
	worker *worker
	timer  *time.Timer
}

// call carries out a request when all earlier ones on this card are through.
func (s *seat) call(ctx context.Context, r request) (answer, *CutError) {
	select {
	case s.turn <- struct{}{}:
	case <-ctx.Done():
		return answer{}, late(r, context.Cause(ctx), "an earlier call on this GPU is not through; nothing was done")
	}
	defer func() { <-s.turn }()
	if s.timer != nil {
		s.timer.Stop()
	}
	w, failure := s.ready(ctx, r)
	if failure != nil {
		return answer{}, failure
	}
	a, failure := w.call(ctx, r)
	if failure == nil {
		failure = a.Error
	}
	if failure != nil && !failure.keepsWorker() {
		w.end()
		return answer{}, failure
	}
	s.timer = time.AfterFunc(s.idle, func() { s.dismiss(w) })
	if failure != nil {
		return answer{}, failure
	}
	return a, nil
}

// keepsWorker says whether NVML is as good as before in a worker that failed so. After anything else a new one, with NVML taken afresh, is the better try.
func (e *CutError) keepsWorker() bool {
	switch e.Code {
	case CodeInUse, CodeInsufficient, CodeNotFound, CodeNotSupported, CodeChanged:
		return true
	}
	return false
}

// ready is a worker that can be asked. One that was killed must have gone first.
func (s *seat) ready(ctx context.Context, r request) (*worker, *CutError) {
	if w := s.worker; w != nil {
		if w.usable() {
			return w, nil
		}
		select {
		case <-w.gone:
		case <-ctx.Done():
			return nil, late(r, context.Cause(ctx), fmt.Sprintf("an earlier call still hangs in the NVIDIA driver (process %d): look at dmesg, and reset the GPU or reboot the node", w.process.Pid))
		}
		s.worker = nil
	}
	w, err := s.start()
	if err != nil {
		return nil, r.fail(CodeOther, "start the worker: %v; nothing was done", err)
	}
	s.worker = w
	return w, nil
}

// dismiss ends a worker that nobody has needed for a while.
func (s *seat) dismiss(w *worker) {
	select {
	case s.turn <- struct{}{}:
	default:
		return // it is needed
	}
	defer func() { <-s.turn }()
	if s.worker == w && time.Since(w.lastUse) >= s.idle {
		w.end()
	}
}

// clear ends the worker, and waits for it until ctx ends.
func (s *seat) clear(ctx context.Context) error {
	select {
	case s.turn <- struct{}{}:
	case <-ctx.Done():
		return fmt.Errorf("it is not through with what it does: %w", context.Cause(ctx))
	}
	defer func() { <-s.turn }()
	if s.timer != nil {
		s.timer.Stop()
	}
	if s.worker == nil {
		return nil
	}
	s.worker.end()
	select {
	case <-s.worker.gone:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("process %d hangs in the NVIDIA driver: look at dmesg, and reset the GPU or reboot the node: %w", s.worker.process.Pid, context.Cause(ctx))
	}
}

// worker is a process in which NVML lives.
type worker struct {
	process   *os.Process
	stdin     io.WriteCloser
	answers   chan answer
	gone      chan struct{} // closed when the process has ended
	failure   error         // how it ended, to be read after that
	lastWords *tail
	ended     bool
	lastUse   time.Time
}

func startWorker(p Paths, command []string) (*worker, error) {
	child := exec.Command(command[0], command[1:]...)
	stdin, err := child.StdinPipe() // its end tells the child that we are gone
	if err != nil {
		return nil, err
	}
	stdout, err := child.StdoutPipe()
	if err != nil {
		return nil, err
	}
	w := &worker{stdin: stdin, answers: make(chan answer, 1), gone: make(chan struct{}), lastWords: &tail{limit: 2048}}
	child.Stderr = w.lastWords
	child.WaitDelay = time.Second
	if err := child.Start(); err != nil {
		return nil, err
	}
	w.process = child.Process
	go func() {
		defer close(w.gone)
		err := w.listen(stdout)
		_ = child.Process.Kill() // one that does not speak any more, or nonsense, is of no use
		w.failure = errors.Join(err, child.Wait())
	}()
	// A worker that does not even take this has died: the first request will say so.
	_ = w.send(p)
	return w, nil
}

// listen takes answers until there are no more.
func (w *worker) listen(stdout io.Reader) error {
	decoder := json.NewDecoder(stdout)
	for {
		var a answer
		if err := decoder.Decode(&a); err != nil {
			if errors.Is(err, io.EOF) {
				return nil
			}
			return fmt.Errorf("read its answer: %w", err)
		}
		select {
		case w.answers <- a:
		default:
			return errors.New("it answered what nobody asked")
		}
	}
}

func (w *worker) send(v any) error {
	line, err := json.Marshal(v)
	if err != nil {
		return err
	}
	_, err = w.stdin.Write(append(line, '\n'))
	return err
}

// usable says whether the worker can be asked again.
func (w *worker) usable() bool {
	select {
	case <-w.gone:
		return false
	default:
		return !w.ended
	}
}

func (w *worker) call(ctx context.Context, r request) (answer, *CutError) {
	defer func() { w.lastUse = time.Now() }()
	r.Patience = retryFor(ctx)
	_ = w.send(r) // if it cannot be told, it is gone
	select {
	case a := <-w.answers:
		return a, nil
	case <-ctx.Done():
		w.end()
		return answer{}, late(r, context.Cause(ctx), "the driver has not answered in time, and what it does is not known")
	case <-w.gone:
	}
	select {
	case a := <-w.answers: // its last one
		return a, nil
	default:
		return answer{}, r.fail(CodeDied, "the process that talks to the driver died (%v)%s", w.failure, w.lastWords)
	}
}

// end kills the worker: it has nothing to save. It has gone when the driver lets it go.
func (w *worker) end() {
	w.ended = true
	_ = w.stdin.Close()
	_ = w.process.Kill()
}
