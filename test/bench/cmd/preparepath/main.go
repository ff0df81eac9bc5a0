// preparepath lists the functions of pkg/ that run during one warm Prepare of a whole GPU. The
// plugin runs in this process on a simulated node, and the call comes over its socket as from the
// kubelet. `make prepare-path` builds this program with coverage counters and runs it.
//
// The list is a measure of how much code a reader must know to follow a Prepare. Background work
// may run at the same time, so only functions that ran in every one of several calls count.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime/coverage"
	"slices"
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
)

func main() {
	klog.LogToStderr(false)
	klog.SetOutput(os.Stderr)
	functions := flag.Int("functions", 0, "fail if more functions ran; 0 means no limit")
	files := flag.Int("files", 0, "fail if the functions are in more files; 0 means no limit")
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
	files := map[string]bool{}
	for _, f := range ran {
		fmt.Println(f)
		file, _, _ := strings.Cut(f, " ")
		files[file] = true
	}
	fmt.Printf("%d functions in %d files\n", len(ran), len(files))
	if maxFunctions > 0 && len(ran) > maxFunctions || maxFiles > 0 && len(files) > maxFiles {
		return fmt.Errorf("more than %d functions or %d files", maxFunctions, maxFiles)
	}
	return nil
}

// measure returns the functions that ran in each of several calls, as "file function".
func measure(ctx context.Context, root string) (_ []string, err error) {
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
	var ran []string
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
					ran = slices.DeleteFunc(ran, func(f string) bool { return !slices.Contains(now, f) })
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
func functionsIn(ctx context.Context, dir string) ([]string, error) {
	profile := filepath.Join(dir, "profile")
	if out, err := exec.CommandContext(ctx, "go", "tool", "covdata", "textfmt", "-i="+dir, "-o="+profile).CombinedOutput(); err != nil {
		return nil, fmt.Errorf("convert the coverage counters: %w: %s", err, out)
	}
	out, err := exec.CommandContext(ctx, "go", "tool", "cover", "-func="+profile).Output()
	if err != nil {
		return nil, fmt.Errorf("read the coverage profile: %w", err)
	}
	var ran []string
	for line := range strings.Lines(string(out)) {
		// A line is "path/file.go:12:	function	85.7%".
		fields := strings.Fields(line)
		if len(fields) != 3 || fields[2] == "0.0%" || !strings.Contains(fields[0], "/pkg/") {
			continue
		}
		file, _, _ := strings.Cut(fields[0][strings.Index(fields[0], "/pkg/")+1:], ":")
		ran = append(ran, file+" "+fields[1])
	}
	return ran, nil
}
