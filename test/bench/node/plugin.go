package node

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	resourceapi "k8s.io/api/resource/v1"
	drapb "k8s.io/kubelet/pkg/apis/dra/v1"
	registerapi "k8s.io/kubelet/pkg/apis/pluginregistration/v1"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/driver"
)

const (
	registerTimeout = 30 * time.Second
	stopTimeout     = 20 * time.Second
)

// Plugin is a running process of the plugin. It is registered, so it can be called.
type Plugin struct {
	// Registered is the time from the start of the process until it was notified that the kubelet has
	// registered the plugin.
	Registered time.Duration
	Begin      time.Time

	node  *Node
	cmd   *exec.Cmd
	log   *os.File
	ended chan struct{}
	conn  *grpc.ClientConn
	dra   drapb.DRAPluginClient
}

// Start starts the plugin's process. As soon as the registration socket exists, it registers the
// plugin as the kubelet would.
func (n *Node) Start(ctx context.Context) (*Plugin, error) {
	log, err := os.OpenFile(n.Log, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return nil, err
	}
	p := &Plugin{node: n, cmd: n.command(), log: log, ended: make(chan struct{})}
	p.cmd.Stdout, p.cmd.Stderr = log, log
	p.Begin = time.Now()
	if err := p.cmd.Start(); err != nil {
		return nil, errors.Join(fmt.Errorf("start the plugin: %w", err), log.Close())
	}
	go func() {
		defer close(p.ended)
		_ = p.cmd.Wait()
	}()
	if err := p.register(ctx); err != nil {
		return nil, errors.Join(err, p.Stop())
	}
	return p, nil
}

func (p *Plugin) register(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, registerTimeout)
	defer cancel()
	path := filepath.Join(p.node.cfg.RegistrarDir, driver.DriverName+"-reg.sock")
	err := until(ctx, "the plugin of node "+p.node.Name+" can be registered (its output: "+p.node.Log+")", func() error {
		select {
		case <-p.ended:
			return errors.New("the plugin has ended")
		default:
		}
		conn, err := net.Dial("unix", path)
		if err != nil {
			return err
		}
		return conn.Close()
	})
	if err != nil {
		return err
	}
	registrar, err := dial(path)
	if err != nil {
		return err
	}
	defer func() { _ = registrar.Close() }()
	client := registerapi.NewRegistrationClient(registrar)
	info, err := client.GetInfo(ctx, &registerapi.InfoRequest{})
	if err != nil {
		return fmt.Errorf("get the plugin info of node %s: %w", p.node.Name, err)
	}
	if p.conn, err = dial(info.GetEndpoint()); err != nil {
		return err
	}
	p.dra = drapb.NewDRAPluginClient(p.conn)
	if _, err := client.NotifyRegistrationStatus(ctx, &registerapi.RegistrationStatus{PluginRegistered: true}); err != nil {
		return fmt.Errorf("register the plugin of node %s: %w", p.node.Name, err)
	}
	p.Registered = time.Since(p.Begin)
	return nil
}

func dial(path string) (*grpc.ClientConn, error) {
	return grpc.NewClient("unix://"+path, grpc.WithTransportCredentials(insecure.NewCredentials()))
}

// Prepare calls NodePrepareResources for one claim, as the kubelet does.
func (p *Plugin) Prepare(ctx context.Context, c *resourceapi.ResourceClaim) error {
	answer, err := p.dra.NodePrepareResources(ctx, &drapb.NodePrepareResourcesRequest{Claims: asked(c)})
	if err != nil {
		return fmt.Errorf("prepare claim %s: %w", c.Name, err)
	}
	of := answer.GetClaims()[string(c.UID)]
	if of.GetError() != "" || len(of.GetDevices()) == 0 {
		return fmt.Errorf("prepare claim %s: %d devices, %s", c.Name, len(of.GetDevices()), of.GetError())
	}
	return nil
}

// Unprepare calls NodeUnprepareResources for one claim, as the kubelet does.
func (p *Plugin) Unprepare(ctx context.Context, c *resourceapi.ResourceClaim) error {
	answer, err := p.dra.NodeUnprepareResources(ctx, &drapb.NodeUnprepareResourcesRequest{Claims: asked(c)})
	if err != nil {
		return fmt.Errorf("unprepare claim %s: %w", c.Name, err)
	}
	of, answered := answer.GetClaims()[string(c.UID)]
	if !answered || of.GetError() != "" {
		return fmt.Errorf("unprepare claim %s: %s", c.Name, of.GetError())
	}
	return nil
}

func asked(c *resourceapi.ResourceClaim) []*drapb.Claim {
	return []*drapb.Claim{{Namespace: c.Namespace, Name: c.Name, Uid: string(c.UID)}}
}

// Stop terminates the plugin, and waits until the plugin and its child processes have ended.
func (p *Plugin) Stop() error {
	tree := p.Processes()
	_ = p.cmd.Process.Signal(syscall.SIGTERM)
	var err error
	select {
	case <-p.ended:
	case <-time.After(stopTimeout):
		err = fmt.Errorf("the plugin of node %s does not end (its output: %s)", p.node.Name, p.node.Log)
		_ = p.cmd.Process.Kill()
		<-p.ended
	}
	if p.conn != nil {
		err = errors.Join(err, p.conn.Close())
	}
	ctx, cancel := context.WithTimeout(context.Background(), stopTimeout)
	defer cancel()
	for _, pid := range tree {
		err = errors.Join(err, until(ctx, fmt.Sprintf("process %d of node %s has ended", pid, p.node.Name), func() error {
			if stat, err := readStat(pid); err == nil && !strings.HasPrefix(stat.state, "Z") {
				return errors.New("still running")
			}
			return nil
		}))
	}
	return errors.Join(err, p.log.Close())
}
