package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/klog/v2"
	"sigs.k8s.io/yaml"

	"github.com/gpu-dra-driver/gpu-dra-driver/cmd/kubectl-gpu/internal/doctor"
	"github.com/gpu-dra-driver/gpu-dra-driver/cmd/kubectl-gpu/internal/explain"
	"github.com/gpu-dra-driver/gpu-dra-driver/cmd/kubectl-gpu/internal/fleet"
	"github.com/gpu-dra-driver/gpu-dra-driver/cmd/kubectl-gpu/internal/migrate"
	"github.com/gpu-dra-driver/gpu-dra-driver/cmd/kubectl-gpu/internal/slices"
	"github.com/gpu-dra-driver/gpu-dra-driver/cmd/kubectl-gpu/internal/status"
)

// options are the flags that all commands have.
type options struct {
	kubeconfig, context, namespace, archive, output string
	out, err                                        io.Writer
}

func newCommand(out, errOut io.Writer) *cobra.Command {
	o := &options{out: out, err: errOut}
	klog.SetLogger(klog.Logger{}) // warnings of the client library are not for users
	root := &cobra.Command{
		Use:   "kubectl-gpu",
		Short: "Show what claims, nodes and GPUs of a cluster do, and why",
		Annotations: map[string]string{
			cobra.CommandDisplayNameAnnotation: "kubectl gpu",
		},
		Version: version, SilenceUsage: true, SilenceErrors: true,
	}
	root.SetOut(out)
	root.SetErr(errOut)
	f := root.PersistentFlags()
	f.StringVar(&o.kubeconfig, "kubeconfig", "", "path of the kubeconfig file")
	f.StringVar(&o.context, "context", "", "context of the kubeconfig file")
	f.StringVarP(&o.namespace, "namespace", "n", "", "namespace (default: that of the context)")
	f.StringVar(&o.archive, "archive", "", "read this archive of kubectl gpu gather instead of a cluster")
	f.StringVarP(&o.output, "output", "o", "", "json, yaml or wide")
	_ = root.RegisterFlagCompletionFunc("output", cobra.FixedCompletions([]string{"json", "yaml", "wide"}, cobra.ShellCompDirectiveNoFileComp))
	root.PersistentPreRunE = func(*cobra.Command, []string) error {
		switch o.output {
		case "", "json", "yaml", "wide":
			return nil
		default:
			return fmt.Errorf("output %q is unknown: use json, yaml or wide", o.output)
		}
	}
	root.SetFlagErrorFunc(func(c *cobra.Command, err error) error { return fmt.Errorf("%w. Usage: %s", err, c.UseLine()) })
	root.AddCommand(o.explainCommand(), o.statusCommand(), o.doctorCommand(), o.migrateCommand(), o.gatherCommand(), o.slicesCommand())
	return root
}

// config returns the kubeconfig that the flags and $KUBECONFIG name.
func (o *options) config() clientcmd.ClientConfig {
	rules := clientcmd.NewDefaultClientConfigLoadingRules()
	rules.ExplicitPath = o.kubeconfig
	return clientcmd.NewNonInteractiveDeferredLoadingClientConfig(rules, &clientcmd.ConfigOverrides{CurrentContext: o.context})
}

// client returns a client of the cluster.
func (o *options) client() (*kubernetes.Clientset, error) {
	config, err := o.config().ClientConfig()
	if clientcmd.IsEmptyConfig(err) {
		return nil, errors.New("there is no kubeconfig: set --kubeconfig or $KUBECONFIG, or read an archive with --archive")
	}
	if err != nil {
		return nil, fmt.Errorf("read the kubeconfig: %w", err)
	}
	config.ContentType = "application/vnd.kubernetes.protobuf"
	config.AcceptContentTypes = "application/vnd.kubernetes.protobuf,application/json"
	config.UserAgent = "kubectl-gpu/" + version
	// A few large lists: the client's own limit of five requests a second would only slow them.
	config.QPS, config.Burst = 50, 100
	return kubernetes.NewForConfig(config)
}

// read returns the state of the cluster or of the archive.
func (o *options) read(ctx context.Context) (*fleet.Snapshot, error) {
	if o.archive != "" {
		return fleet.ReadArchive(o.archive)
	}
	client, err := o.client()
	if err != nil {
		return nil, err
	}
	return fleet.Read(ctx, client, func(ctx context.Context) ([]byte, error) {
		return client.Discovery().RESTClient().Get().AbsPath("/metrics").DoRaw(ctx)
	})
}

// namespaceOr returns the namespace of the flag, of the kubeconfig, or "default".
func (o *options) namespaceOr() string {
	if o.namespace != "" {
		return o.namespace
	}
	if o.archive == "" {
		if namespace, _, err := o.config().Namespace(); err == nil {
			return namespace
		}
	}
	return "default"
}

// print writes v as JSON or YAML, or calls text.
func (o *options) print(v any, text func(w io.Writer, wide bool)) error {
	switch o.output {
	case "json":
		e := json.NewEncoder(o.out)
		e.SetIndent("", "  ")
		e.SetEscapeHTML(false)
		return e.Encode(v)
	case "yaml":
		content, err := yaml.Marshal(v)
		if err != nil {
			return err
		}
		_, err = o.out.Write(content)
		return err
	default:
		text(o.out, o.output == "wide")
		return nil
	}
}

// warn writes what the answer lacks to standard error.
func (o *options) warn(s *fleet.Snapshot) {
	for _, what := range s.Missing {
		fmt.Fprintf(o.err, "Warning: not read: %s\n", what)
	}
}

// usage adds the usage of the command to an error about its arguments.
func usage(check cobra.PositionalArgs) cobra.PositionalArgs {
	return func(c *cobra.Command, args []string) error {
		if err := check(c, args); err != nil {
			return fmt.Errorf("%w. Usage: %s", err, c.UseLine())
		}
		return nil
	}
}

// kinds are what explain explains, by the words for it.
var kinds = map[string]func(*explain.Explainer, context.Context, string, string) (*explain.Report, error){
	"pod": (*explain.Explainer).Pod, "pods": (*explain.Explainer).Pod, "po": (*explain.Explainer).Pod,
	"claim": (*explain.Explainer).Claim, "claims": (*explain.Explainer).Claim,
	"resourceclaim": (*explain.Explainer).Claim, "resourceclaims": (*explain.Explainer).Claim,
}

func (o *options) explainCommand() *cobra.Command {
	c := &cobra.Command{
		Use:   "explain pod|claim NAME",
		Short: "Say why a Pod or claim is where it is, and what would make it fit",
		Long: "Say why a Pod or claim is where it is, and what would make it fit.\n\n" +
			"The NAME may have its namespace: team-a/train, as the answers write it.",
		Args: usage(func(c *cobra.Command, args []string) error {
			if err := cobra.ExactArgs(2)(c, args); err != nil {
				return err
			}
			if kinds[args[0]] == nil {
				return fmt.Errorf("%q is neither pod nor claim", args[0])
			}
			return nil
		}),
		RunE: func(c *cobra.Command, args []string) error {
			s, err := o.read(c.Context())
			if err != nil {
				return err
			}
			o.warn(s)
			namespace, name := o.namespaceOr(), args[1]
			if before, after, both := strings.Cut(name, "/"); both {
				namespace, name = before, after
			}
			report, err := kinds[args[0]](explain.New(s), c.Context(), namespace, name)
			if err != nil {
				return err
			}
			return o.print(report, report.Text)
		},
	}
	c.ValidArgsFunction = func(c *cobra.Command, args []string, _ string) ([]string, cobra.ShellCompDirective) {
		switch len(args) {
		case 0:
			return []string{"pod", "claim"}, cobra.ShellCompDirectiveNoFileComp
		case 1:
			return o.completeNames(c.Context(), args[0]), cobra.ShellCompDirectiveNoFileComp
		default:
			return nil, cobra.ShellCompDirectiveNoFileComp
		}
	}
	return c
}

func (o *options) statusCommand() *cobra.Command {
	c := &cobra.Command{
		Use:   "status [NODE]",
		Short: "Show the GPUs of each node with their claims, free capacity and taints",
		Long: "Show the GPUs of each node with their claims, free capacity and taints.\n\n" +
			"With a NODE or -o wide it draws each GPU as a bar with a character for each memory slice.\n" +
			"A dot is free, a letter is the claim that is listed below with it.",
		Args: usage(cobra.MaximumNArgs(1)),
		RunE: func(c *cobra.Command, args []string) error {
			s, err := o.read(c.Context())
			if err != nil {
				return err
			}
			o.warn(s)
			node := ""
			if len(args) > 0 {
				node = args[0]
				if s.Node(node) == nil {
					return fmt.Errorf("node %s does not exist: kubectl gpu status lists the nodes with GPUs", node)
				}
			}
			report := status.Of(s, node)
			return o.print(report, func(w io.Writer, wide bool) { report.Text(w, wide || node != "") })
		},
	}
	c.ValidArgsFunction = func(c *cobra.Command, args []string, _ string) ([]string, cobra.ShellCompDirective) {
		s, err := o.read(c.Context())
		if err != nil || len(args) > 0 {
			return nil, cobra.ShellCompDirectiveNoFileComp
		}
		var names []string
		for _, n := range status.Of(s, "").Nodes {
			names = append(names, n.Name)
		}
		return names, cobra.ShellCompDirectiveNoFileComp
	}
	return c
}

func (o *options) doctorCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "doctor",
		Short: "Check the cluster for this driver. Each finding names what repairs it",
		Long: "Check the cluster for this driver. Each finding names what repairs it.\n\n" +
			"The exit code is 3 if there is an error or a warning, and 0 if there are only notes.",
		Args: cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			s, err := o.read(c.Context())
			if err != nil {
				return err
			}
			report := doctor.Check(s)
			if err := o.print(report, report.Text); err != nil {
				return err
			}
			if report.Failed() {
				return errFindings
			}
			return nil
		},
	}
}

func (o *options) migrateCommand() *cobra.Command {
	c := &cobra.Command{
		Use: "migrate", Short: "Help with a move from another driver of NVIDIA GPUs", Args: cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error { return c.Help() },
	}
	c.AddCommand(&cobra.Command{
		Use:   "check",
		Short: "List what would change with this driver. The exit code is 3 if something would",
		Args:  cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			s, err := o.read(c.Context())
			if err != nil {
				return err
			}
			o.warn(s)
			report, err := migrate.Check(s)
			if err != nil {
				return err
			}
			if err := o.print(report, report.Text); err != nil {
				return err
			}
			if len(report.Changes) > 0 {
				return errFindings
			}
			return nil
		},
	})
	return c
}

// completeNames returns the names of the Pods with claims, or of the claims, in the namespace.
func (o *options) completeNames(ctx context.Context, kind string) []string {
	ctx, cancel := context.WithTimeout(ctx, 3*time.Second)
	defer cancel()
	s, err := o.read(ctx)
	if err != nil {
		return nil
	}
	namespace := o.namespaceOr()
	var all []string
	if strings.Contains(kind, "claim") {
		for _, c := range s.Claims {
			if c.Namespace == namespace {
				all = append(all, c.Name)
			}
		}
		return all
	}
	for _, p := range s.Pods {
		if p.Namespace == namespace && len(p.Spec.ResourceClaims) > 0 {
			all = append(all, p.Name)
		}
	}
	return all
}

func (o *options) gatherCommand() *cobra.Command {
	var file string
	var pods bool
	var maxBytes int
	var lines int64
	c := &cobra.Command{
		Use:   "gather",
		Short: "Write everything that a bug report needs into one archive",
		Long: "Write everything that a bug report needs into one archive.\n\n" +
			"It never has Secrets or environment variables, nor the parameters of other drivers.\n" +
			"Of Pods it has names, claims and nodes only, unless --pods is set.\n" +
			"With --logs it also has the end of the logs of the driver's Pods, without tokens and passwords.",
		Args: cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			if maxBytes < 1 {
				return fmt.Errorf("--max-bytes is %d: use a number of bytes", maxBytes)
			}
			s, err := o.read(c.Context())
			if err != nil {
				return err
			}
			logs, err := o.logs(c.Context(), s, lines)
			if err != nil {
				return err
			}
			now := time.Now()
			if file == "" {
				file = "gpu-gather-" + now.UTC().Format("20060102-150405") + ".tar.gz"
			}
			f, err := os.OpenFile(file, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
			if errors.Is(err, os.ErrExist) {
				return fmt.Errorf("%w: name another file with -f", err)
			}
			if err != nil {
				return err
			}
			m, err := s.WriteArchive(f, fleet.ArchiveOptions{Program: version, Time: now, Pods: pods, MaxBytes: maxBytes, Logs: logs})
			if err := errors.Join(err, f.Close()); err != nil {
				return errors.Join(fmt.Errorf("write %s: %w", file, err), os.Remove(file))
			}
			written := struct {
				Archive string `json:"archive"`
				fleet.Manifest
			}{file, m}
			return o.print(written, func(w io.Writer, _ bool) {
				fmt.Fprintf(w, "Wrote %s\n", file)
				for _, part := range m.Files {
					fmt.Fprintf(w, "  %-28s %9d bytes\n", part.Name, part.Bytes)
				}
				for _, what := range m.LeftOut {
					fmt.Fprintf(w, "  Left out: %s\n", what)
				}
			})
		},
	}
	c.Flags().StringVarP(&file, "file", "f", "", "name of the archive (default: gpu-gather-TIME.tar.gz)")
	c.Flags().BoolVar(&pods, "pods", false, "include what the scheduler looks at in Pods: selectors, affinity, tolerations, requests")
	c.Flags().Int64Var(&lines, "logs", 0, "include this many last lines of the log of each container of the driver")
	c.Flags().IntVar(&maxBytes, "max-bytes", 256<<20, "limit for the content before compression. The least important files are left out")
	return c
}

// logs returns the last lines of the driver's logs, and notes in s which ones are missing.
func (o *options) logs(ctx context.Context, s *fleet.Snapshot, lines int64) ([]fleet.Log, error) {
	switch {
	case lines == 0:
		return nil, nil
	case lines < 0:
		return nil, fmt.Errorf("--logs is %d: use a number of lines", lines)
	case o.archive != "":
		return nil, errors.New("--logs needs a cluster, and --archive is set")
	}
	client, err := o.client()
	if err != nil {
		return nil, err
	}
	logs, missing := fleet.ReadLogs(ctx, client, lines)
	s.Missing = append(s.Missing, missing...)
	return logs, nil
}

// The values of --for.
const (
	forKarpenter         = "karpenter"
	forClusterAutoscaler = "cluster-autoscaler"
)

func (o *options) slicesCommand() *cobra.Command {
	var autoscaler string
	var set slices.Options
	c := &cobra.Command{
		Use:   "slices MODEL|NODE --for karpenter|cluster-autoscaler",
		Short: "Print the ResourceSlices of a node that does not exist yet, for an autoscaler",
		Long: "Print the ResourceSlices of a node that does not exist yet, for an autoscaler.\n\n" +
			"A MODEL is a name from the list below, or a file that gpu-kubelet-plugin inventory -o model wrote.\n" +
			"For a NODE it prints what this node publishes, as a new node would. The output is YAML, or JSON\n" +
			"with -o json.\n\nModels: " + strings.Join(slices.Known(), ", "),
		Args: usage(cobra.ExactArgs(1)),
		RunE: func(c *cobra.Command, args []string) error {
			if autoscaler != forKarpenter && autoscaler != forClusterAutoscaler {
				return fmt.Errorf("--for is %q: use %s or %s", autoscaler, forKarpenter, forClusterAutoscaler)
			}
			t, err := o.template(c, args[0], set)
			if err != nil {
				return err
			}
			for _, note := range t.Notes {
				fmt.Fprintf(o.err, "Note: %s\n", note)
			}
			if o.output != "json" {
				o.output = "yaml"
			}
			if autoscaler == forKarpenter {
				return o.print(slices.ForKarpenter(set.Name, t), nil)
			}
			return o.print(slices.ForClusterAutoscaler(t), nil)
		},
		ValidArgsFunction: cobra.FixedCompletions(slices.Known(), cobra.ShellCompDirectiveDefault),
	}
	f := c.Flags()
	f.StringVar(&autoscaler, "for", "", "karpenter or cluster-autoscaler")
	f.StringVar(&set.Name, "name", "gpu-node-template", "name of the node and its pool in the output")
	f.IntVar(&set.GPUs, "gpus", 0, "number of GPUs of a MODEL (default: as many as the model has)")
	f.StringVar(&set.MIGPolicy, "mig-policy", "static", "the plugin's setting mig, for a MODEL: a policy or YAML")
	f.StringVar(&set.Shares, "shares", "", "the plugin's setting shares, for a MODEL, in YAML")
	forms := []string{forKarpenter, forClusterAutoscaler}
	_ = c.RegisterFlagCompletionFunc("for", cobra.FixedCompletions(forms, cobra.ShellCompDirectiveNoFileComp))
	return c
}

// template returns what a node of the model, or like the node, will publish.
func (o *options) template(c *cobra.Command, name string, set slices.Options) (slices.Template, error) {
	m, err := slices.Model(name)
	if err != nil {
		return slices.Template{}, err
	}
	if m != nil {
		return slices.OfModel(*m, set)
	}
	for _, flag := range []string{"gpus", "mig-policy", "shares"} {
		if c.Flags().Changed(flag) {
			return slices.Template{}, fmt.Errorf("%s is no model, and --%s is for models. Models: %s", name, flag,
				strings.Join(slices.Known(), ", "))
		}
	}
	s, err := o.read(c.Context())
	if err != nil {
		return slices.Template{}, err
	}
	return slices.OfNode(s, name, set.Name)
}
