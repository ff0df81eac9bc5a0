package toolchain

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync/atomic"
	"time"
)

// goBuild is one call of `go build`.
type goBuild struct {
	name     string   // in progress lines and errors
	dir      string   // the module's folder
	packages []string // what to build
	tags     string
	ldflags  string
	env      []string // in addition to the caller's environment
	output   string   // a folder (with a trailing slash) or a file
}

// reportEvery is the time between two progress lines while packages compile.
const reportEvery = 10 * time.Second

func (b goBuild) args() []string {
	args := []string{"build", "-v", "-trimpath", "-buildvcs=false"}
	if b.tags != "" {
		args = append(args, "-tags", b.tags)
	}
	return append(append(args, "-ldflags", b.ldflags, "-o", b.output), b.packages...)
}

// run runs `go build` and prints a progress line every few seconds. On failure the error has the
// compiler's output.
func (b goBuild) run(ctx context.Context, progress *Progress) error {
	var total, compiled atomic.Int64
	defer progress.every(reportEvery, func() string {
		if total.Load() == 0 {
			return b.name + ": downloading modules"
		}
		return fmt.Sprintf("%s: %d of at most %d packages compiled", b.name, compiled.Load(), total.Load())
	})()
	packages, err := b.countPackages(ctx)
	if err != nil {
		return err
	}
	total.Store(packages)
	cmd := exec.CommandContext(ctx, "go", b.args()...)
	cmd.Dir, cmd.Env = b.dir, b.environment()
	stderr, err := cmd.StderrPipe()
	if err != nil {
		return err
	}
	if err := cmd.Start(); err != nil {
		return fmt.Errorf("start the Go compiler: %w", err)
	}
	complaints := follow(stderr, &compiled)
	if err := cmd.Wait(); err != nil {
		return fmt.Errorf("go %s in %s: %w\n%s", strings.Join(b.args(), " "), b.dir, err, complaints)
	}
	return nil
}

// follow reads the output of `go build -v`. In the parameter compiled it counts the lines that name
// a compiled package. It returns the other lines.
func follow(output io.Reader, compiled *atomic.Int64) string {
	var complaints strings.Builder
	lines := bufio.NewScanner(output)
	for lines.Scan() {
		line := lines.Text()
		switch {
		case strings.HasPrefix(line, "go: downloading"):
		case !strings.ContainsAny(line, " \t:"):
			compiled.Add(1)
		default:
			complaints.WriteString(line + "\n")
		}
	}
	_, _ = io.Copy(io.Discard, output) // a line too long for the scanner must not stop the compiler
	return complaints.String()
}

// countPackages returns how many packages the build compiles. It also downloads the modules that
// the build needs.
func (b goBuild) countPackages(ctx context.Context) (int64, error) {
	args := []string{"list", "-deps"}
	if b.tags != "" {
		args = append(args, "-tags", b.tags)
	}
	cmd := exec.CommandContext(ctx, "go", append(args, b.packages...)...)
	cmd.Dir, cmd.Env = b.dir, b.environment()
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		return 0, fmt.Errorf("list the packages of %s: %w\n%s", b.name, err, stderr.String())
	}
	return int64(bytes.Count(out, []byte("\n"))), nil
}

func (b goBuild) environment() []string {
	return append(os.Environ(), append([]string{"GOWORK=off", "GOFLAGS="}, b.env...)...)
}

// goIdentity returns a text that names the Go toolchain and the platform of builds in dir.
func goIdentity(ctx context.Context, dir string) (string, error) {
	cmd := exec.CommandContext(ctx, "go", "env", "GOVERSION", "GOOS", "GOARCH")
	cmd.Dir = dir
	out, err := cmd.Output()
	if err != nil {
		return "", fmt.Errorf("ask Go for its version: %w (Go must be in PATH)", err)
	}
	return strings.Join(strings.Fields(string(out)), " "), nil
}

// goSources lists the files below dir that a Go package is compiled from, without test files and
// nested modules.
func goSources(dir string) ([]string, error) {
	var files []string
	err := filepath.WalkDir(dir, func(path string, entry os.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if entry.IsDir() {
			if _, err := os.Stat(filepath.Join(path, "go.mod")); err == nil && path != dir {
				return filepath.SkipDir
			}
			return nil
		}
		if strings.HasSuffix(path, ".go") && !strings.HasSuffix(path, "_test.go") {
			files = append(files, path)
		}
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("list the sources below %s: %w", dir, err)
	}
	return files, nil
}
