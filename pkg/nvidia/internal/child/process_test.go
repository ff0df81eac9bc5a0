package child

import (
	"context"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia/internal/host"
)

type message struct {
	Order int `json:"order"`
	Say   int `json:"say"`
}

// start starts a child process that runs a shell script.
func start(t *testing.T, script string) *Process[message] {
	t.Helper()
	p, err := Start[message](Command{Args: []string{"sh", "-c", script}, Env: []string{"SAY=7"}}, message{Order: 1})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		p.Kill()
		<-p.Gone
	})
	return p
}

func TestMessagesArriveInOrderAndBeforeTheEnd(t *testing.T) {
	p := start(t, `read order; echo "$order"; read order; echo "$order{\"say\":$SAY}"`)
	if m := <-p.Messages; m.Order != 1 {
		t.Errorf("the process got the order %+v", m)
	}
	if err := p.Send(message{Order: 2}); err != nil {
		t.Error(err)
	}
	for _, want := range []message{{Order: 2}, {Say: 7}} {
		select {
		case m := <-p.Messages:
			if m != want {
				t.Errorf("got %+v, want %+v", m, want)
			}
		case <-p.Ended:
			t.Error("the process ended before its last message was taken")
		}
	}
	<-p.Ended
	<-p.Gone
	if p.IsUsable() || !p.IsGone() {
		t.Error("a process that has ended can be used")
	}
}

func TestFailureHasExitStatusOrInvalidMessage(t *testing.T) {
	for script, says := range map[string]string{
		"exit 0": "exit status 0", "echo broken >&2; exit 3": "exit status 3: broken", "echo hello; exec sleep 3600": "read its answer: ",
		"kill -9 $$": "signal: killed", "head -c 5000 /dev/zero | tr '\\0' x >&2; exit 1": "exit status 1: xxx",
	} {
		p := start(t, script)
		<-p.Ended
		got := p.Failure().Error() + p.Stderr()
		if !strings.HasPrefix(got, says) || len(got) > keptStderr+100 {
			t.Errorf("%s: %s", script, got)
		}
	}
}

func TestKillEndsProcessWhoseGrandchildHasItsOutput(t *testing.T) {
	p := start(t, `read order; sleep 3600 & echo '{}'; wait`)
	<-p.Messages
	p.Kill()
	p.Kill()
	<-p.Killed
	<-p.Ended
	<-p.Gone
	if err := p.Hanging(io.EOF); err.PID != p.PID || err.Gone != p.Gone {
		t.Errorf("%+v", err)
	}
}

func TestKillDropsMessageThatNobodyTakes(t *testing.T) {
	p := start(t, `echo '{}'; exec sleep 3600`)
	p.Kill()
	<-p.Gone
}

func TestDismissedProcessSendsItsLastMessages(t *testing.T) {
	p := start(t, `cat > /dev/null; echo '{"say":1}'`)
	p.Dismiss()
	if m := <-p.Messages; m.Say != 1 {
		t.Errorf("%+v", m)
	}
	<-p.Gone
}

func TestProcessCannotOpenHiddenNodes(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("needs root: a mount namespace")
	}
	dir := t.TempDir()
	hidden, open := filepath.Join(dir, "nvidia0"), filepath.Join(dir, "nvidia1")
	for _, path := range []string{hidden, open} {
		if err := unix.Mknod(path, unix.S_IFCHR|0o600, int(unix.Mkdev(1, 3))); err != nil { // as /dev/null
			t.Fatal(err)
		}
	}
	p, err := Start[message](Command{
		Args: []string{"sh", "-c", "cat " + open + " || exit 1; cat " + hidden + " && exit 2; exit 5"}, Hidden: []string{hidden},
	}, message{})
	if err != nil {
		t.Fatal(err)
	}
	<-p.Ended
	if err := p.Failure(); err.Error() != "exit status 5" {
		t.Errorf("%v%s", err, p.Stderr())
	}
}

func TestMissingProgramIsNotStarted(t *testing.T) {
	if _, err := Start[message](Command{Args: []string{"/nonexistent"}}, message{}); err == nil {
		t.Error("it was started")
	}
}

func TestOrderEndsWithParent(t *testing.T) {
	in, parent := io.Pipe()
	go func() { _, _ = io.WriteString(parent, `{"order":4}`+"\n") }()
	order, ctx, end, err := Order[message](t.Context(), in)
	if err != nil || order.Order != 4 || ctx.Err() != nil {
		t.Fatal(order, ctx.Err(), err)
	}
	defer end()
	_ = parent.Close()
	<-ctx.Done()
	if _, _, _, err := Order[message](context.Background(), strings.NewReader("no JSON")); err == nil {
		t.Error("invalid JSON was accepted")
	}
}

// The test expects that no output of a child process makes its parent panic or wait forever.
func FuzzMessages(f *testing.F) {
	for _, said := range []string{
		``, `{}`, `{`, `null`, `{}{}{}`, `{"node":{"gpus":[{}]}}`, `{"state":{"mig":{"instances":[{"compute":[]}]}}}`,
		`{"event":{"kind":"xid","xid":-1}}`, "\x00", `[1`,
	} {
		f.Add(said)
	}
	type anyMessage struct {
		device.Signal
		Node  *nvidia.Node      `json:"node"`
		State *device.CardState `json:"state"`
	}
	killed := make(chan struct{})
	close(killed)
	f.Fuzz(func(_ *testing.T, said string) {
		messages := make(chan anyMessage, len(said))
		_ = receive(strings.NewReader(said), messages, make(chan struct{}))
		_ = receive(strings.NewReader(said), make(chan anyMessage), killed)
	})
}

func TestChildIsKnownAsTheirOwnByOtherInstances(t *testing.T) {
	p := start(t, `read order; echo "$order"; read wait`)
	<-p.Messages
	if process := host.ProcessOf(nvidia.Paths{Proc: "/proc"}, uint32(p.PID)); !process.Plugin {
		t.Errorf("%+v", process)
	}
	if process := host.ProcessOf(nvidia.Paths{Proc: "/proc"}, uint32(os.Getpid())); process.Plugin {
		t.Errorf("%+v", process)
	}
}
