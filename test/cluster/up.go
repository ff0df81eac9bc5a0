package cluster

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"

	"golang.org/x/sync/errgroup"

	"github.com/gpu-dra-driver/gpu-dra-driver/test/cluster/internal/cgroup"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/cluster/internal/machine"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/cluster/internal/toolchain"
)

// Up builds missing programs and starts a new cluster. It first removes what an unsuccessful Up of
// the same name left. If Up fails, the machines are off, but their logs stay until Down. If ctx
// ends, nothing stays.
func Up(ctx context.Context, options Options) (*Cluster, error) {
	options, err := options.complete()
	if err != nil {
		return nil, err
	}
	if err := needRoot(); err != nil {
		return nil, err
	}
	programs, err := Build(ctx, options, options.Output)
	if err != nil {
		return nil, err
	}
	unlock, err := lockDir(ctx, clusterDir(options.Name))
	if err != nil {
		return nil, err
	}
	defer func() { unlock() }()
	previous, err := readState(options.Name)
	switch {
	case err == nil && previous.Complete:
		return nil, fmt.Errorf("cluster %s is there already: use it, or take it down first", options.Name)
	case !errors.Is(err, fs.ErrNotExist):
		if err := demolish(ctx, options.Name); err != nil {
			return nil, err
		}
		unlock()
		if unlock, err = lockDir(ctx, clusterDir(options.Name)); err != nil {
			return nil, err
		}
	}
	rising := &Cluster{name: options.Name, programs: programs, machines: map[string]*machine.Spec{}}
	if err := rising.rise(ctx, options); err != nil {
		if ctx.Err() != nil {
			return nil, errors.Join(fmt.Errorf("bring cluster %s up: %w", options.Name, err), demolish(ctx, options.Name))
		}
		return nil, errors.Join(fmt.Errorf("bring cluster %s up: %w", options.Name, err), rising.powerOff(ctx))
	}
	return rising, nil
}

func (c *Cluster) rise(ctx context.Context, options Options) error {
	progress := toolchain.NewProgress(options.Output)
	var names []string
	for _, node := range options.Nodes {
		names = append(names, node.Name)
	}
	var err error
	if c.state, err = reserve(ctx, c.name, state{Nodes: names, Programs: c.programs}, progress); err != nil {
		return err
	}
	if err := c.describe(options); err != nil {
		return err
	}
	if err := c.state.Network.build(); err != nil {
		return err
	}
	progress.Printf("booting %s and %d nodes", controlPlane, len(names))
	boots, bootCtx := errgroup.WithContext(ctx)
	for name, spec := range c.machines {
		boots.Go(func() error {
			if err := spec.Boot(bootCtx, c.programs.Machine); err != nil {
				return err
			}
			progress.Printf("%s is running", name)
			if name == controlPlane {
				return nil
			}
			return c.loadImages(bootCtx, spec, slices.Concat(c.programs.Images, options.Images))
		})
	}
	if err := boots.Wait(); err != nil {
		return err
	}
	if err := c.awaitReady(ctx); err != nil {
		return err
	}
	progress.Printf("cluster %s is ready: export KUBECONFIG=%s", c.name, c.Kubeconfig())
	c.state.Complete = true
	return writeState(c.name, c.state)
}

func (c *Cluster) loadImages(ctx context.Context, spec *machine.Spec, archives []string) error {
	for _, archive := range archives {
		if err := c.loadImage(ctx, spec, archive); err != nil {
			return err
		}
	}
	return nil
}

// Down stops the cluster and removes everything of it.
func (c *Cluster) Down(ctx context.Context) error { return Down(ctx, c.name) }

// Down removes everything of the named cluster, in any state. It returns no error if there is no
// such cluster.
func Down(ctx context.Context, name string) error {
	if name == "" {
		name = DefaultName
	}
	if !clusterName.MatchString(name) {
		return fmt.Errorf("there can be no cluster named %q", name)
	}
	if err := needRoot(); err != nil {
		return err
	}
	unlock, err := lockDir(ctx, clusterDir(name))
	if err != nil {
		return err
	}
	defer unlock()
	return demolish(ctx, name)
}

func needRoot() error {
	if os.Geteuid() != 0 {
		return errors.New("a cluster needs root, for namespaces, mounts and links: run this with sudo -E")
	}
	return nil
}

// powerOff kills the machines and removes the network links. It keeps the files, so that the logs
// can be read.
func (c *Cluster) powerOff(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), downTimeout)
	defer cancel()
	return errors.Join(cgroup.Destroy(ctx, c.state.CgroupBases), c.state.Network.remove())
}
