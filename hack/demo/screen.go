package main

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"sync"
	"time"
)

// screen prints the output of each command in one piece after the command has ended, so that lines
// of the background build cannot mix with it.
type screen struct {
	mu    sync.Mutex
	out   io.Writer
	start time.Time
}

func newScreen(out io.Writer) *screen { return &screen{out: out, start: time.Now()} }

func (s *screen) print(text string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	_, _ = io.WriteString(s.out, text)
}

// title prints the title of the next part of the demo.
func (s *screen) title(text string) {
	s.print(fmt.Sprintf("\n\033[1m== %s\033[0m  (%s)\n", text, time.Since(s.start).Round(time.Second)))
}

// background returns a writer that prints each line with this name as prefix.
func (s *screen) background(name string) *lines { return &lines{screen: s, name: name} }

type lines struct {
	screen *screen
	name   string
	rest   []byte
}

func (l *lines) Write(p []byte) (int, error) {
	l.rest = append(l.rest, p...)
	for {
		i := bytes.IndexByte(l.rest, '\n')
		if i < 0 {
			return len(p), nil
		}
		l.screen.print(fmt.Sprintf("   %s | %s\n", l.name, l.rest[:i]))
		l.rest = l.rest[i+1:]
	}
}

// run runs the command cmd. It prints the text shown as the command line, and the command's output
// below it. It returns standard output.
func (s *screen) run(cmd *exec.Cmd, shown string) (string, error) {
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	err := cmd.Run()
	s.print("$ " + shown + "\n" + stdout.String() + stderr.String())
	if err != nil {
		return stdout.String(), fmt.Errorf("%s: %w", shown, err)
	}
	return stdout.String(), nil
}

// command returns a command that runs in the folder root with additional environment variables.
func command(ctx context.Context, root string, env []string, argv ...string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, argv[0], argv[1:]...)
	cmd.Dir, cmd.Env = root, append(os.Environ(), env...)
	return cmd
}

// short returns the command line as text, with paths relative to the folder root.
func short(root string, argv ...string) string {
	return strings.ReplaceAll(strings.Join(argv, " "), root+"/", "")
}
