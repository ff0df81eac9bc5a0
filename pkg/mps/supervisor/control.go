package supervisor

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"maps"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/mps"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/mps/namespace"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia/driverroot"
)

const (
	// answerTimeout is how long the control daemon may take for one command, which it answers from its memory.
	answerTimeout = 5 * time.Second
	// maxAnswer is how much of an answer is read.
	maxAnswer = 64 << 10
	// multiUser is the option for clients of several users. Drivers that lack it (550 does, 555 has it) take it for no option at all and look for a daemon.
	multiUser = "-multiuser-server"
	noDaemon  = "Cannot find MPS control daemon process"
)

// control is the way to one daemon: the vendor's own client, run in a mount namespace that shows the daemon's pipes.
type control struct {
	program string
	view    namespace.View
	env     []string
}

// newControl looks for the driver's programs anew each time: a driver may come late, or be replaced.
func newControl(o Options, spec mps.Daemon) (control, error) {
	paths := o.visible()
	program, err := driverroot.Find(o.DriverRootMount, controlProgram)
	if err != nil {
		return control{}, fmt.Errorf("find the driver's MPS on this node (driver root %s): %w", o.DriverRoot, err)
	}
	server, err := driverroot.Find(o.DriverRootMount, serverProgram)
	if err != nil {
		return control{}, fmt.Errorf("find the driver's MPS on this node (driver root %s): %w", o.DriverRoot, err)
	}
	return control{
		program: o.Program,
		view: namespace.View{
			Pipes: paths.Pipes(spec.ID), Logs: paths.Logs(spec.ID), Shm: paths.Shm(spec.ID),
			DriverRoot: o.DriverRootMount, LibraryDir: program.LibraryDir, Programs: []string{program.Path, server.Path}, Dev: o.dev(),
		},
		// Nothing is inherited: a variable of this process's Pod must not become one of CUDA's.
		env: append([]string{
			mark(paths, spec.ID),
			"CUDA_VISIBLE_DEVICES=" + strings.Join(spec.Devices, ","),
			"CUDA_MPS_PIPE_DIRECTORY=" + namespace.Pipes,
			"CUDA_MPS_LOG_DIRECTORY=" + namespace.Logs,
		}, namespace.Environment()...),
	}, nil
}

func mark(paths mps.Paths, id string) string { return marker + paths.Dir(id) }

// daemonArgs start the control daemon in the foreground, where it writes its log to its standard output.
func daemonArgs(spec mps.Daemon) []string {
	if spec.MultiUser {
		return []string{"-f", multiUser}
	}
	return []string{"-f"}
}

// ask sends one command to the daemon and gives its answer.
func (c control) ask(ctx context.Context, command string) (string, error) {
	ctx, cancel := context.WithTimeoutCause(ctx, answerTimeout, fmt.Errorf("the control daemon has not answered for %s", answerTimeout))
	defer cancel()
	client := exec.CommandContext(ctx, c.program, "daemon", c.view.String())
	client.Env, client.Dir = c.env, "/"
	client.Stdin = strings.NewReader(command + "\n")
	var answer limited
	client.Stdout, client.Stderr = &answer, &answer
	client.WaitDelay = time.Second
	err := client.Run()
	text := strings.TrimSpace(answer.String())
	switch {
	case ctx.Err() != nil:
		return "", fmt.Errorf("%q: %w", command, context.Cause(ctx))
	case err != nil:
		return "", fmt.Errorf("%q: %w: %.500s", command, err, text)
	}
	return text, nil
}

// limited keeps the beginning of what is written to it.
type limited struct{ bytes.Buffer }

func (l *limited) Write(p []byte) (int, error) {
	_, _ = l.Buffer.Write(p[:min(len(p), max(0, maxAnswer-l.Len()))])
	return len(p), nil
}

// setting is a default of the daemon: how it is set and read, and whether what was read is what was set.
type setting struct {
	set, get string
	holds    func(answer string) bool
}

// settings are what the specification asks for.
func settings(spec mps.Daemon) []setting {
	var all []setting
	if p := spec.ThreadPercentage; p != nil {
		all = append(all, setting{
			set: fmt.Sprintf("set_default_active_thread_percentage %d", *p),
			get: "get_default_active_thread_percentage",
			holds: func(answer string) bool {
				have, err := strconv.ParseFloat(answer, 64)
				return err == nil && have == float64(*p)
			},
		})
	}
	for _, ordinal := range slices.Sorted(maps.Keys(spec.MemoryLimits)) {
		limit := spec.MemoryLimits[ordinal]
		all = append(all, setting{
			set:   fmt.Sprintf("set_default_device_pinned_mem_limit %d %dM", ordinal, limit),
			get:   fmt.Sprintf("get_default_device_pinned_mem_limit %d", ordinal),
			holds: func(answer string) bool { return holdsLimit(answer, limit) },
		})
	}
	return all
}

// holdsLimit compares a limit in MiB with what the daemon says of it: whole GiB if it is that much or more (1500M is answered as 1G), else MiB.
func holdsLimit(answer string, limit uint64) bool {
	number, gib := strings.CutSuffix(answer, "G")
	if gib {
		limit /= 1024
	} else {
		number = strings.TrimSuffix(answer, "M")
	}
	have, err := strconv.ParseUint(number, 10, 64)
	return err == nil && number != answer && have == limit
}

// apply sets every default that does not hold, and reads it back.
func (c control) apply(ctx context.Context, spec mps.Daemon) error {
	for _, s := range settings(spec) {
		if answer, err := c.ask(ctx, s.get); err != nil {
			return err
		} else if s.holds(answer) {
			continue
		}
		said, err := c.ask(ctx, s.set)
		if err != nil {
			return err
		}
		answer, err := c.ask(ctx, s.get)
		if err != nil {
			return err
		}
		if !s.holds(answer) {
			return fmt.Errorf("the control daemon does not keep %q: it answers %.200q, and then %.200q to %q", s.set, said, answer, s.get)
		}
	}
	return nil
}

// awaitAnswer returns when the daemon answers, or with an error when its process has ended or the context has.
func (c control) awaitAnswer(ctx context.Context, p *process) error {
	pause := 10 * time.Millisecond
	for {
		_, err := c.ask(ctx, "get_server_list")
		if err == nil {
			return nil
		}
		timer := time.NewTimer(pause)
		select {
		case <-p.done:
			timer.Stop()
			return errEnded
		case <-ctx.Done():
			timer.Stop()
			return fmt.Errorf("%w (last: %w)", context.Cause(ctx), err)
		case <-timer.C:
		}
		pause = min(2*pause, time.Second)
	}
}

// errEnded says that the control daemon has ended; why, its output tells.
var errEnded = errors.New("the control daemon ended")
