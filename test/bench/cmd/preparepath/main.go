// preparepath lists the functions of pkg/ that run during one warm Prepare of a whole GPU. The
// plugin runs in this process on a simulated node, and the call comes over its socket as from the
// kubelet. `make prepare-path` builds this program with coverage counters and runs it.
//
// The list is a measure of how much code a reader must know to follow a Prepare. Background work
// may run at the same time, so only functions that ran in every one of several calls are listed.
// Each declared function and method is one, with its closures and with all files of all packages
// below pkg/. The number before it is that of its statements. Functions with at most four, such as
// accessors and forwarders, are listed but do not count as a step: a reader sees through them.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"runtime/coverage"
	"slices"
	"strconv"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"k8s.io/klog/v2"
	drapb "k8s.io/kubelet/pkg/apis/dra/v1"

	"github.com/gpu-dra-driver/gpu-dra-driver/test/nodeharness"
)

const (
	calls = 5
	// startTimeout limits how long the plugin may take until it prepares its first claim.
	startTimeout = time.Minute
	pause        = 50 * time.Millisecond
	// seenThrough is the number of statements up to which a function is no step.
	seenThrough = 4
)

// function is a declared function that ran.
type function struct {
	file, name string
	statements int
}

func main() {
	klog.LogToStderr(false)
	klog.SetOutput(os.Stderr)
	functions := flag.Int("functions", 0, "fail if more steps ran; 0 means no limit")
	files := flag.Int("files", 0, "fail if the steps are in more files; 0 means no limit")
	flag.Parse()
	handled, err := nodeharness.ServeRole(context.Background(), nil)
	if !handled {
		err = run(context.Background(), *functions, *files)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "preparepath:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, maxFunctions, maxFiles int) error {
	// The path of a Unix socket must be shorter than 108 bytes.
	root, err := os.MkdirTemp("", "path-")
	if err != nil {
		return err
	}
	defer func() { _ = os.RemoveAll(root) }()
	ran, err := measure(ctx, root)
	if err != nil {
		return err
	}
	stepsIn, files := map[string]int{}, map[string]bool{}
	steps := 0
	for _, f := range ran {
		fmt.Printf("%4d %s %s\n", f.statements, f.file, f.name)
		files[f.file] = true
		if f.statements > seenThrough {
			steps++
			stepsIn[f.file]++
		}
	}
	fmt.Printf("%d functions in %d files; %d of them, in %d files, have more than %d statements\n",
		len(ran), len(files), steps, len(stepsIn), seenThrough)
	if maxFunctions > 0 && steps > maxFunctions || maxFiles > 0 && len(stepsIn) > maxFiles {
		return fmt.Errorf("more than %d functions or %d files", maxFunctions, maxFiles)
	}
	return nil
}

// measure returns the functions that ran in each of several calls.
func measure(ctx context.Context, root string) (_ []function, err error) {
	const gpu = "0000:1b:00.0"
	h, err := nodeharness.LayOut(ctx, root, gpu)
	if err != nil {
		return nil, err
	}
	api := nodeharness.NewAPI()
	plugin, err := h.Start(ctx, api)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, plugin.Stop()) }()
	var ran []function
	for i := range calls + 1 { // the first call waits for the start, and warms up
		claim := nodeharness.Claim(fmt.Sprint("claim-", i), "gpu-0000-1b-00-0")
		if err := api.Allocate(ctx, claim); err != nil {
			return nil, err
		}
		asked := []*drapb.Claim{{Namespace: claim.Namespace, Name: claim.Name, Uid: string(claim.UID)}}
		kubelet, err := dial(ctx, h.Config().PluginDir)
		if err != nil {
			return nil, err
		}
		deadline := time.Now().Add(startTimeout)
		for {
			<-time.After(pause) // lets the work of earlier calls end
			if err := coverage.ClearCounters(); err != nil {
				return nil, err
			}
			answer, err := kubelet.NodePrepareResources(ctx, &drapb.NodePrepareResourcesRequest{Claims: asked})
			counted := filepath.Join(root, fmt.Sprint("counters-", i))
			if err := errors.Join(err, writeCounters(counted)); err != nil {
				return nil, err
			}
			failed := answer.GetClaims()[string(claim.UID)].GetError()
			if failed == "" {
				now, err := functionsIn(ctx, counted)
				if err != nil {
					return nil, err
				}
				switch i {
				case 0:
				case 1:
					ran = now
				default:
					ran = slices.DeleteFunc(ran, func(f function) bool { return !slices.Contains(now, f) })
				}
				break
			}
			if i > 0 || time.Now().After(deadline) {
				return nil, errors.New(failed)
			}
		}
		if _, err := kubelet.NodeUnprepareResources(ctx, &drapb.NodeUnprepareResourcesRequest{Claims: asked}); err != nil {
			return nil, err
		}
	}
	return ran, nil
}

// dial connects to the plugin's socket in dir once it is there.
func dial(ctx context.Context, dir string) (drapb.DRAPluginClient, error) {
	ctx, cancel := context.WithTimeout(ctx, startTimeout)
	defer cancel()
	for {
		if sockets, _ := filepath.Glob(filepath.Join(dir, "*.sock")); len(sockets) == 1 {
			conn, err := grpc.NewClient("unix://"+sockets[0], grpc.WithTransportCredentials(insecure.NewCredentials()))
			return drapb.NewDRAPluginClient(conn), err
		}
		select {
		case <-ctx.Done():
			return nil, fmt.Errorf("wait for the plugin's socket in %s: %w", dir, ctx.Err())
		case <-time.After(pause):
		}
	}
}

func writeCounters(dir string) error {
	if err := os.MkdirAll(dir, 0o750); err != nil {
		return err
	}
	return errors.Join(coverage.WriteMetaDir(dir), coverage.WriteCountersDir(dir))
}

// functionsIn returns the functions of pkg/ whose counters in dir are not zero.
func functionsIn(ctx context.Context, dir string) ([]function, error) {
	profile := filepath.Join(dir, "profile")
	if out, err := exec.CommandContext(ctx, "go", "tool", "covdata", "textfmt", "-i="+dir, "-o="+profile).CombinedOutput(); err != nil {
		return nil, fmt.Errorf("convert the coverage counters: %w: %s", err, out)
	}
	out, err := exec.CommandContext(ctx, "go", "tool", "cover", "-func="+profile).Output()
	if err != nil {
		return nil, fmt.Errorf("read the coverage profile: %w", err)
	}
	blocks, err := os.ReadFile(profile)
	if err != nil {
		return nil, err
	}
	statements := map[string]map[int]int{} // by the file and the line at which a block begins
	for line := range strings.Lines(string(blocks)) {
		// A line is "path/file.go:12.34,15.2 3 1": from, to, statements, count.
		file, place, _ := strings.Cut(line, ":")
		var begin, column, end, endColumn, n, count int
		if _, err := fmt.Sscanf(place, "%d.%d,%d.%d %d %d", &begin, &column, &end, &endColumn, &n, &count); err != nil {
			continue // the first line, which says "mode"
		}
		if statements[file] == nil {
			statements[file] = map[int]int{}
		}
		statements[file][begin] += n
	}
	var ran []function
	lines := slices.Collect(strings.Lines(string(out)))
	for i, line := range lines {
		file, begin, name, covered := parse(line)
		if covered == "0.0%" || !strings.Contains(file, "/pkg/") {
			continue
		}
		f := function{file: file[strings.Index(file, "/pkg/")+1:], name: name}
		end := math.MaxInt // where the file's next function begins
		if next, at, _, _ := parse(lines[min(i+1, len(lines)-1)]); next == file && at > begin {
			end = at
		}
		for at, n := range statements[file] {
			if at >= begin && at < end {
				f.statements += n
			}
		}
		ran = append(ran, f)
	}
	return ran, nil
}

// parse reads a line of "go tool cover -func": "path/file.go:12:	function	85.7%".
func parse(line string) (file string, begin int, name, covered string) {
	fields := strings.Fields(line)
	if len(fields) != 3 {
		return "", 0, "", ""
	}
	place := strings.Split(fields[0], ":")
	begin, _ = strconv.Atoi(place[min(1, len(place)-1)])
	return place[0], begin, fields[1], fields[2]
}
