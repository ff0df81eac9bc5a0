package paint

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// terminalFile returns the user's end of a new terminal.
func terminalFile(t *testing.T) *os.File {
	t.Helper()
	master, err := os.OpenFile("/dev/ptmx", os.O_RDWR|unix.O_NOCTTY, 0)
	if err != nil {
		t.Skipf("SKIPPED: no terminal can be made here: %v", err)
	}
	t.Cleanup(func() { _ = master.Close() })
	if err := unix.IoctlSetPointerInt(int(master.Fd()), unix.TIOCSPTLCK, 0); err != nil {
		t.Fatal(err)
	}
	n, err := unix.IoctlGetInt(int(master.Fd()), unix.TIOCGPTN)
	if err != nil {
		t.Fatal(err)
	}
	user, err := os.OpenFile(fmt.Sprintf("/dev/pts/%d", n), os.O_RDWR|unix.O_NOCTTY, 0)
	if err != nil {
		t.Skipf("SKIPPED: no terminal can be made here: %v", err)
	}
	t.Cleanup(func() { _ = user.Close() })
	return user
}

func TestColoursOnlyOnATerminal(t *testing.T) {
	t.Setenv("TERM", "xterm")
	t.Setenv("NO_COLOR", "")
	file, err := os.Create(filepath.Join(t.TempDir(), "out"))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = file.Close() }()
	if got := Bad(Out(file), "x"); got != "x" {
		t.Errorf("a file gets %q", got)
	}
	var text strings.Builder
	if got := Good(&text, "x"); got != "x" {
		t.Errorf("a writer gets %q", got)
	}
	user := terminalFile(t)
	for _, paint := range []string{Bad(Out(user), "x"), Careful(Out(user), "x"), Good(Out(user), "x"), Strong(Out(user), "x")} {
		if !strings.HasPrefix(paint, "\x1b[") || !strings.HasSuffix(paint, "x\x1b[0m") {
			t.Errorf("a terminal gets %q", paint)
		}
	}
	if got := Bad(Out(user), ""); got != "" {
		t.Errorf("an empty text becomes %q", got)
	}
	t.Setenv("NO_COLOR", "1")
	if got := Bad(Out(user), "x"); got != "x" {
		t.Errorf("with NO_COLOR a terminal gets %q", got)
	}
	t.Setenv("NO_COLOR", "")
	t.Setenv("TERM", "dumb")
	if got := Bad(Out(user), "x"); got != "x" {
		t.Errorf("a dumb terminal gets %q", got)
	}
}
