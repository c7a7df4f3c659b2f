// Renders the templates of ops/helm/kvrouted without Helm. scripts/test-charts calls it.
//
//	go run scripts/charts/render.go TEMPLATES VALUES.json RELEASE NAMESPACE
//
// Helm's templates are Go's text/template with more functions and objects. The chart uses a small part of them, and this
// program knows no other: .Values, .Release.Name, .Release.Namespace, what text/template has itself, toJson and sha256sum.
// Anything else fails here.
package main

import (
	"bytes"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"sort"
	"strings"
	"text/template"
)

func toJSON(value interface{}) (string, error) {
	text, err := json.Marshal(value)
	return string(text), err
}

func run(arguments []string) error {
	if len(arguments) != 4 {
		return fmt.Errorf("usage: render TEMPLATES VALUES.json RELEASE NAMESPACE")
	}
	text, err := os.ReadFile(arguments[1])
	if err != nil {
		return err
	}
	var values map[string]interface{}
	if err := json.Unmarshal(text, &values); err != nil {
		return err
	}
	context := map[string]interface{}{
		"Values":  values,
		"Release": map[string]interface{}{"Name": arguments[2], "Namespace": arguments[3]},
	}
	paths, err := filepath.Glob(filepath.Join(arguments[0], "*.yaml"))
	if err != nil {
		return err
	}
	sort.Strings(paths)
	functions := template.FuncMap{
		"toJson":    toJSON,
		"sha256sum": func(text string) string { return fmt.Sprintf("%x", sha256.Sum256([]byte(text))) },
	}
	for _, path := range paths {
		source, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		name := filepath.Base(path)
		parsed, err := template.New(name).Option("missingkey=zero").Funcs(functions).Parse(string(source))
		if err != nil {
			return err
		}
		var out bytes.Buffer
		if err := parsed.Execute(&out, context); err != nil {
			return err
		}
		if body := strings.TrimSpace(out.String()); body != "" {
			fmt.Printf("---\n# %s\n%s\n", name, body)
		}
	}
	return nil
}

func main() {
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "render:", err)
		os.Exit(1)
	}
}
